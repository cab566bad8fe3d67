package command

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/client"
)

// contexts is the file of clusters that a person works with.
type contexts struct {
	Current  string             `yaml:"current,omitempty"`
	Clusters map[string]cluster `yaml:"clusters,omitempty"`
}

type cluster struct {
	URL string `yaml:"url" json:"url"`
}

func contextsPath() (string, error) {
	dir, err := os.UserConfigDir()
	if err != nil {
		return "", settings.Usagef("find the configuration folder: %w", err)
	}
	return filepath.Join(dir, "penstock", "contexts.yaml"), nil
}

// loadContexts reads the file; a missing one is an empty one.
func loadContexts() (contexts, error) {
	path, err := contextsPath()
	if err != nil {
		return contexts{}, nil // whoever has no folder has no contexts
	}
	in, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return contexts{}, nil
	}
	if err != nil {
		return contexts{}, settings.Usagef("read contexts: %w (--url and $"+urlVariable+" do without them)", err)
	}
	defer in.Close()
	var c contexts
	dec := yaml.NewDecoder(in)
	dec.KnownFields(true)
	if err := dec.Decode(&c); err != nil && !errors.Is(err, io.EOF) {
		return contexts{}, settings.Usagef("read contexts: %s: %w (correct or remove the file; --url and $"+urlVariable+" do without it)", path, err)
	}
	return c, nil
}

// save replaces the file in one step, so that a crash leaves the old or the new one.
func (c contexts) save() error {
	path, err := contextsPath()
	if err != nil {
		return err
	}
	text, err := yaml.Marshal(c)
	if err != nil {
		return fmt.Errorf("write contexts: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("write contexts: %w", err)
	}
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return fmt.Errorf("write contexts: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("write contexts: %w", err)
	}
	return nil
}

func (c contexts) names() []string {
	names := make([]string, 0, len(c.Clusters))
	for name := range c.Clusters {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (c contexts) require(name string) error {
	if _, ok := c.Clusters[name]; ok {
		return nil
	}
	return &missingError{fmt.Sprintf("there is no context %q%s (penstock context list shows them, penstock context set makes one)", name, didYouMean(name, c.names()))}
}

func (a *app) contextCommand() *cobra.Command {
	cmd := group("context", "Clusters that you work with, kept in your configuration folder")
	cmd.AddCommand(a.contextList(), a.contextSet(), a.contextUse(), a.contextDelete())
	return cmd
}

func (a *app) contextList() *cobra.Command {
	cmd := &cobra.Command{
		Use: "list", Short: "List contexts; * marks the current one", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			c, err := loadContexts()
			if err != nil {
				return err
			}
			v := view{kind: "ContextList", columns: []string{"CURRENT", "NAME", "URL"}}
			for _, name := range c.names() {
				mark := ""
				if name == c.Current {
					mark = "*"
				}
				v.rows = append(v.rows, row{
					name: name, cells: []string{mark, name, c.Clusters[name].URL},
					data: struct {
						Name    string `json:"name"`
						URL     string `json:"url"`
						Current bool   `json:"current"`
					}{name, c.Clusters[name].URL, name == c.Current},
				})
			}
			return v.print(a.out, format)
		},
	}
	addOutputFlag(cmd)
	return cmd
}

func (a *app) contextSet() *cobra.Command {
	return &cobra.Command{
		Use: "set NAME URL", Short: "Add or change a context", Args: exactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "" {
				return settings.Usagef("a context needs a name")
			}
			parsed, err := client.Connect(cmd.Context(), args[1]) // says what is wrong with the URL; calls nobody
			if err != nil {
				return err
			}
			if err := parsed.Close(cmd.Context()); err != nil {
				return err
			}
			c, err := loadContexts()
			if err != nil {
				return err
			}
			if c.Clusters == nil {
				c.Clusters = map[string]cluster{}
			}
			c.Clusters[args[0]] = cluster{URL: args[1]}
			if c.Current == "" {
				c.Current = args[0]
			}
			return c.save()
		},
	}
}

func (a *app) contextUse() *cobra.Command {
	return &cobra.Command{
		Use: "use NAME", Short: "Make a context the current one", Args: exactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			c, err := loadContexts()
			if err != nil {
				return err
			}
			if err := c.require(args[0]); err != nil {
				return err
			}
			c.Current = args[0]
			return c.save()
		},
	}
}

func (a *app) contextDelete() *cobra.Command {
	return &cobra.Command{
		Use: "delete NAME", Short: "Forget a context", Args: exactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			c, err := loadContexts()
			if err != nil {
				return err
			}
			if err := c.require(args[0]); err != nil {
				return err
			}
			delete(c.Clusters, args[0])
			if c.Current == args[0] {
				c.Current = ""
			}
			return c.save()
		},
	}
}
