package client

// Brokers lists the brokers that the client knows.
func (c *Client) Brokers() []string { return c.dir.candidates("") }

// Buffered returns the bytes that wait for the application.
func (s *Consumer) Buffered() (bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.partitions {
		bytes += p.in.flow.bytes
	}
	return bytes
}
