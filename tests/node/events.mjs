// The gateway's client as the node serves it: says on its standard output what it gets, a JSON object a line.
const { url, options } = JSON.parse(process.argv[2]);
const source = await (await fetch(`${url}/client/events.js`)).text();
const { EventStream } = await import(`data:text/javascript,${encodeURIComponent(source)}`);
const say = (what) => console.log(JSON.stringify(what));

const stream = new EventStream(url, options);
try {
  await stream.opened();
  say({ opened: stream.position });
  for await (const envelope of stream) {
    say({ objects: envelope.payload_summary.object_ids ?? [], type: envelope.event_type, position: stream.position });
  }
} catch (error) {
  say({ failed: error.reason, code: error.code, name: error.name });
}
