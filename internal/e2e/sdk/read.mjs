// Reads messages, a JSON object a line, with the CloudEvents SDK for JavaScript, and prints what it has read.
import { HTTP } from "cloudevents";
import { createInterface } from "node:readline";

for await (const line of createInterface({ input: process.stdin })) {
  const { headers, body } = JSON.parse(line);
  const event = HTTP.toEvent({ headers, body: Buffer.from(body, "base64").toString() });
  event.validate();
  const { id, source, type, subject, data } = event;
  console.log(JSON.stringify({ id, source, type, subject, data }));
}
