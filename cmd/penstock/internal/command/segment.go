package command

import (
	"bufio"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/penstock-mq/penstock/pkg/segment"
	"github.com/penstock-mq/penstock/pkg/vfs"
)

func (a *app) segmentCommand() *cobra.Command {
	cmd := group("segment", "Files of a bookie's log, on this machine")
	cmd.AddCommand(a.segmentDump())
	return cmd
}

func (a *app) segmentDump() *cobra.Command {
	cmd := &cobra.Command{
		Use: "dump FILE", Short: "Print a segment: header, batches, records, footer, and a verdict on its tail", Args: exactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			format, err := outputFormat(cmd)
			if err != nil {
				return err
			}
			if format == "table" || format == "wide" { // printed as it is read, however large
				out := bufio.NewWriter(a.out)
				if err := segment.Dump(out, vfs.OS(), args[0]); err != nil {
					return err //nolint:wrapcheck // it names the file
				}
				if err := out.Flush(); err != nil {
					return fmt.Errorf("print segment: %w", err)
				}
				return nil
			}
			d, err := segment.Describe(vfs.OS(), args[0])
			if err != nil {
				return err //nolint:wrapcheck // it names the file
			}
			v := view{kind: "Segment", single: true, rows: []row{{name: args[0], data: d}}}
			return v.print(a.out, format)
		},
	}
	addOutputFlag(cmd)
	return cmd
}
