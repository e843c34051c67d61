// Package publish puts events into a JetStream stream, once and in order, and
// reads back what is there.
//
// [Connect] and [Stream] reach the server and judge the stream, [Template] and
// [Envelope] make a message of a row, and [Lane] sends it and takes the PubAcks.
// A [*RowError] is a row's own fault; every other failure ends the session and
// is nobody's attempt.
//
// The least that a relay of stream EVENTS, subject events.{event_type} and inbox
// prefix _RELAY.a1 needs to be allowed:
//
//	publish:   events.>
//	           $JS.API.STREAM.INFO.EVENTS
//	           $JS.API.STREAM.MSG.GET.EVENTS
//	           $JS.API.CONSUMER.CREATE.EVENTS.>
//	           $JS.API.CONSUMER.MSG.NEXT.EVENTS.>
//	           $JS.API.CONSUMER.DELETE.EVENTS.>
//	           $JS.API.STREAM.CREATE.EVENTS    where it is to create the stream
//	subscribe: _RELAY.a1.>                     or _INBOX.> without a prefix
//
// In a JetStream domain, $JS.API is $JS.<domain>.API.
package publish
