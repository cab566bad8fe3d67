package main

// limited is how many series the graphs of topics show.
func limited(expr string) string { return "topk(10, " + expr + ")" }

func topics() board {
	const subscription = "{{topic}} {{subscription}}"
	topic := func(expr func(metric, by string) string, metric string) []line {
		return []line{{limited(expr(metric, "topic")), "{{topic}}"}}
	}
	sub := func(metric string) []line {
		return []line{{limited(sum(metric, "topic, subscription")), subscription}}
	}
	return board{
		uid: "penstock-topics", title: "Penstock / Topics and subscriptions",
		about:  "The busiest topics and the subscriptions that are furthest behind, of what /metrics/topics serves; ten a graph.",
		topics: true,
		rows: []row{
			{"Topics", []panel{
				{title: "Published", about: "Messages a second.", unit: "ops", lines: topic(rate, "penstock_topic_published_messages_total")},
				{title: "Bytes published", about: "Bytes of batches.", unit: "Bps", lines: topic(rate, "penstock_topic_published_bytes_total")},
				{title: "Stored", about: "Bytes, each entry counted once.", unit: "bytes", lines: topic(sum, "penstock_topic_stored_bytes")},
				{title: "Delivered", about: "Messages handed to consumers and readers a second.", unit: "ops", lines: topic(rate, "penstock_topic_delivered_messages_total")},
				{title: "Bytes delivered", about: "Bytes of their batches.", unit: "Bps", lines: topic(rate, "penstock_topic_delivered_bytes_total")},
				{title: "Connections", about: "Producers, and consumers with readers.", unit: "short", lines: []line{
					{limited(sum("penstock_topic_producers", "topic")), "{{topic}} producers"}, {limited(sum("penstock_topic_consumers", "topic")), "{{topic}} consumers"},
				}},
			}},
			{"Subscriptions", []panel{
				{title: "Oldest unacknowledged message", about: "How long ago it was published. docs/runbooks/PenstockSubscriptionLag.md", unit: "s", lines: sub("penstock_subscription_oldest_unacked_age_seconds")},
				{title: "Messages not acknowledged", about: "Those on their way to consumers included.", unit: "short", lines: sub("penstock_subscription_backlog_messages")},
				{title: "Bytes not acknowledged", about: "Stored from the oldest unacknowledged message on.", unit: "bytes", lines: sub("penstock_subscription_backlog_bytes")},
				{title: "On their way", about: "Messages delivered, neither acknowledged nor given back.", unit: "short", lines: sub("penstock_subscription_unacked_messages")},
				{title: "Consumers", about: "Connected.", unit: "short", lines: sub("penstock_subscription_consumers")},
				{kind: list, title: "What delivery waits for", about: "docs/cli.md says what each reason needs; penstock subscription why TOPIC SUBSCRIPTION says more.", unit: "short", lines: []line{
					{"max by (topic, subscription, reason) (penstock_subscription_waiting{$of}) > 0", ""},
				}},
			}},
			{"All", []panel{
				{title: "Open topics", about: "Of the whole cluster.", unit: "short", lines: []line{{`sum(penstock_broker_topics{job="$job"})`, "topics"}}},
				{title: "Subscriptions", about: "Of the open topics.", unit: "short", stacked: true, lines: []line{{`sum by (namespace) (penstock_cursor_subscriptions{job="$job"})`, "{{namespace}}"}}},
				{title: "Series left out", about: "Of /metrics/topics, by its top and by its limit.", unit: "ops", lines: []line{{`sum(rate(penstock_broker_topic_series_dropped_total{job="$job"}[$__rate_interval]))`, "left out"}}},
			}},
		},
	}
}
