package command

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	brokerv1 "github.com/penstock-mq/penstock/api/penstock/broker/v1"
	"github.com/penstock-mq/penstock/cmd/internal/settings"
	"github.com/penstock-mq/penstock/pkg/client"
	"github.com/penstock-mq/penstock/pkg/entry"
)

const startForms = "earliest, latest, a position (ledger:entry[:batch]), offset=N, an RFC 3339 time, or an age like 90m"

func addStartFlag(cmd *cobra.Command, name, value, usage string) {
	cmd.Flags().String(name, value, usage+": "+startForms)
}

func startFlag(cmd *cobra.Command, name string) (*brokerv1.Start, error) {
	text, err := cmd.Flags().GetString(name)
	if err != nil {
		return nil, err
	}
	at, err := parseStart(text, time.Now())
	if err != nil {
		return nil, settings.Usagef("--%s: %w", name, err)
	}
	return at.Start(), nil
}

// parseStart reads one of startForms.
func parseStart(text string, now time.Time) (client.Position, error) {
	switch text {
	case "earliest":
		return client.Earliest(), nil
	case "latest":
		return client.Latest(), nil
	}
	if digits, ok := strings.CutPrefix(text, "offset="); ok {
		offset, err := strconv.ParseUint(digits, 10, 64)
		if err != nil {
			return client.Position{}, fmt.Errorf("%q is not an offset", digits)
		}
		return client.AtOffset(entry.Offset(offset)), nil
	}
	if at, err := time.Parse(time.RFC3339Nano, text); err == nil {
		return client.AtTime(at), nil
	}
	if age, err := time.ParseDuration(text); err == nil && age >= 0 {
		return client.AtTime(now.Add(-age)), nil
	}
	if p, err := entry.ParsePosition(text); err == nil {
		return client.AtPosition(p), nil
	}
	return client.Position{}, fmt.Errorf("%q is none of: %s", text, startForms)
}
