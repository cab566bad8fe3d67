package ownership

import "github.com/penstock-mq/penstock/pkg/meta"

// Forgot reports whether nothing is under way or to be done about a bundle that nobody owns.
func (r *Runner) Forgot(id meta.BundleID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	b, ok := r.core.bundles[id]
	return !ok || b.phase == idle && b.owner == "" && !b.known && !b.wanted
}
