package client

// Brokers lists the brokers that the client knows.
func (c *Client) Brokers() []string { return c.dir.candidates("") }
