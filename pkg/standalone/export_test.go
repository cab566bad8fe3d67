package standalone

// HaltEtcd lets etcd end as by a fault of its own.
func (c *Cluster) HaltEtcd() { c.etcd.Halt() }
