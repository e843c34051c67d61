// Package jetstream is the connection to NATS and the stream as a thing: it connects,
// judges the stream, waits until nothing is in flight, and reads stored messages.
//
// [Connect] makes the connection. A [Stream] is checked ([Stream.Check]), asked where it
// ends ([Stream.Fence]), read backwards by a start ([Stream.ScanBackward]) and followed as it
// grows ([Stream.Follow]). Nothing here writes into a stream: package publish does.
//
// The least that a relay of stream EVENTS, subject events.{event_type} and inbox
// prefix _WALPOST.a1 needs to be allowed:
//
//	publish:   events.>
//	           $JS.API.STREAM.INFO.EVENTS
//	           $JS.API.STREAM.MSG.GET.EVENTS
//	           $JS.API.CONSUMER.CREATE.EVENTS.>
//	           $JS.API.CONSUMER.MSG.NEXT.EVENTS.>
//	           $JS.API.CONSUMER.DELETE.EVENTS.>
//	           $JS.API.STREAM.CREATE.EVENTS    where it is to create the stream
//	subscribe: _WALPOST.a1.>
//
// In a JetStream domain, $JS.API is $JS.<domain>.API.
package jetstream
