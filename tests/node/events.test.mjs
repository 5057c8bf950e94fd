// The gateway's client against a node that is played here: what it asks for, in which order, and what it gives.
import assert from "node:assert/strict";
import { test } from "node:test";
import { EventStream, EventStreamError } from "../../src/tidings/server/static/events.js";

const settled = () => new Promise((resolve) => setImmediate(resolve));

/** A node: `sockets` are the connections that were opened, `asked` the pages that were read; pauses pass at once. */
class World {
  sockets = [];
  asked = [];
  pauses = [];
  pages = [];
  time = 0;
  upgrades = () => true;

  stream(options) {
    const world = this;
    class Socket {
      readyState = 0;
      said = [];
      constructor(url) {
        this.query = new URL(url).searchParams;
        world.sockets.push(this);
        setImmediate(() => {
          if (!world.upgrades(this)) return this.cut();
          this.readyState = 1;
          this.onopen();
        });
      }
      send(text) {
        this.said.push(JSON.parse(text));
      }
      close(code = 1000) {
        this.cut(code);
      }
      cut(code = 1006, reason = "") {
        if (this.readyState === 3) return;
        this.readyState = 3;
        this.onclose({ code, reason });
      }
      hear(event, payload) {
        this.onmessage({ data: JSON.stringify({ event, payload, trace_id: "t" }) });
      }
      subscribed(since, resumed = false) {
        this.hear("subscribed", { since, resumed, replayed: 0, per_connection: 8, heartbeat_interval_ms: 1, connection_id: "c" });
      }
      envelope(seq, summary = {}) {
        const each = envelope(seq, summary);
        this.hear(each.event_type, each);
      }
    }
    const platform = {
      WebSocket: Socket,
      fetch: async (url, { headers }) => {
        world.asked.push({ query: new URL(url).searchParams, token: headers.authorization });
        const page = world.pages.shift() ?? { envelopes: [], next_since: 0, at_end: true };
        const { status = 200, ...body } = page;
        return { ok: status === 200, status, json: async () => ({ epoch: "e", ...body }) };
      },
      setTimeout: (wake, ms) => {
        if (ms === 10_000) return 0;
        world.pauses.push(ms);
        setImmediate(wake);
        return 0;
      },
      clearTimeout: () => {},
      now: () => world.time,
    };
    return new EventStream("http://node", { platform, ...options });
  }

  get socket() {
    return this.sockets.at(-1);
  }

  async connected(count = 1) {
    while (this.sockets.length < count || this.socket.said.at(-1)?.type !== "subscribe") await settled();
    return this.socket;
  }
}

function envelope(seq, summary = {}) {
  return {
    event_type: "graph.object_mutated",
    sequence_anchor: { global_seq: seq },
    payload_summary: { object_ids: [`order:${seq}`], ...summary },
    resume_token: `token-${seq}-${summary.part ?? 1}`,
  };
}

/** The places of the next envelopes. */
async function next(stream, count) {
  const found = [];
  while (found.length < count) {
    const { value, done } = await stream.next();
    if (done) break;
    found.push([value.seq, value.payload_summary.part ?? 1]);
  }
  return found.map(([seq, part]) => (part === 1 ? seq : `${seq}.${part}`));
}

test("what was before, up to where the socket begins, comes before what the socket brings", async () => {
  const world = new World();
  world.pages = [
    { envelopes: [envelope(3)], next_since: 3, at_end: false },
    { envelopes: [], next_since: 5, at_end: true },
    { envelopes: [envelope(6), envelope(7)], next_since: 7, at_end: true },
  ];
  const stream = world.stream({ since: 2, domain: "orders", objects: ["a:1", "b:2"] });
  const given = next(stream, 4);
  const socket = await world.connected();
  socket.subscribed(7);
  socket.envelope(8);
  assert.deepEqual(await given, [3, 6, 7, 8]);
  assert.deepEqual(
    world.asked.map(({ query }) => [query.get("since"), query.get("until"), query.get("epoch")]),
    [["2", null, null], ["3", null, "e"], ["5", "7", "e"]],
  );
  assert.deepEqual(world.asked[0].query.getAll("object_id"), ["a:1", "b:2"]);
  assert.deepEqual(socket.said, [
    { type: "subscribe", app_id: "default", subscription_type: "graph", domain_id: "orders", object_ids: ["a:1", "b:2"] },
  ]);
  assert.equal(stream.position, 8);
});

test("a stream without a beginning begins where the socket does, and reads nothing", async () => {
  const world = new World();
  const stream = world.stream({});
  const opening = stream.opened();
  (await world.connected()).subscribed(41);
  await opening;
  world.socket.envelope(42);
  assert.deepEqual(await next(stream, 1), [42]);
  assert.deepEqual([world.asked.length, stream.position], [0, 42]);
});

test("envelopes are acknowledged together, when asked for the next, and only on the socket they came by", async () => {
  const world = new World();
  const stream = world.stream({});
  const given = next(stream, 3);
  const socket = await world.connected();
  socket.subscribed(0);
  for (const seq of [1, 2, 3]) socket.envelope(seq);
  await given;
  assert.deepEqual(socket.said.slice(1), [{ type: "ack", resume_token: "token-2-1" }]);
  socket.cut();
  const more = next(stream, 1);
  const second = await world.connected(2);
  second.subscribed(0, true);
  second.envelope(4);
  await more;
  assert.deepEqual(second.said.map(({ type, resume_token }) => [type, resume_token]), [
    ["resume", "token-3-1"],
    ["subscribe", undefined],
  ]);
  stream.close();
  assert.deepEqual(second.said.at(-1), { type: "ack", resume_token: "token-4-1" });
});

test("a record of several parts is gone on with within, whichever way it comes again", async () => {
  const world = new World();
  world.pages = [{ envelopes: [1, 2, 3].map((part) => envelope(5, { part, parts: 3 })), next_since: 5, at_end: true }];
  const stream = world.stream({});
  const given = next(stream, 4);
  const socket = await world.connected();
  socket.subscribed(3);
  socket.envelope(4);
  socket.envelope(5, { part: 1, parts: 3 });
  while (stream.position !== 4) await settled();
  socket.cut(1001, "shutdown");
  assert.deepEqual(await given, [4, 5, "5.2", "5.3"]);
  assert.equal(world.asked[0].query.get("since"), "4");
  assert.equal(stream.position, 5);
  const more = next(stream, 1);
  const second = await world.connected(2);
  second.subscribed(5);
  second.envelope(6);
  assert.deepEqual(await more, [6]);
  assert.equal(stream.gapCount, 1);
});

test("a token that is refused is caught up from, and one that overflows at once is not tried again", async () => {
  for (const [code, reason] of [[4409, "resume_invalid"], [4413, "buffer_overflow"]]) {
    const world = new World();
    const stream = world.stream({});
    const given = next(stream, 2);
    const first = await world.connected();
    first.subscribed(0);
    first.envelope(1);
    while (stream.position !== 1) await settled();
    first.cut();
    const second = await world.connected(2);
    assert.equal(second.said[0].type, "resume");
    world.pages = [{ envelopes: [envelope(2)], next_since: 2, at_end: true }];
    second.cut(code, reason);
    assert.deepEqual(await given, [1, 2]);
    const third = next(stream, 1);
    const again = await world.connected(3);
    assert.deepEqual(again.said.map(({ type }) => type), ["subscribe"]);
    again.subscribed(2);
    again.envelope(3);
    assert.deepEqual(await third, [3]);
  }
});

test("a program that is too slow waits longer each time before it subscribes again", async () => {
  const world = new World();
  const stream = world.stream({});
  const first = next(stream, 1);
  (await world.connected()).subscribed(0);
  world.socket.envelope(1);
  await first;
  for (const least of [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 1_000]) {
    if (least === 1_000) world.time += 61_000; // a connection that has lasted is a new beginning
    world.pauses = [];
    const seq = stream.position;
    const more = next(stream, 1);
    world.socket.cut(4413, "buffer_overflow");
    await world.connected(world.sockets.length + 1);
    const pause = Math.max(...world.pauses);
    assert.ok(pause >= least && pause <= least + 250, `${pause} and not ${least}`);
    world.socket.subscribed(seq, true);
    world.socket.envelope(seq + 1);
    assert.deepEqual(await more, [seq + 1]);
  }
});

test("whoever makes tokens is asked for another when one has ended; a fixed one ends the stream", async () => {
  const world = new World();
  let count = 0;
  const stream = world.stream({ token: async () => `t${(count += 1)}` });
  const given = next(stream, 2);
  const first = await world.connected();
  first.subscribed(0);
  first.envelope(1);
  while (stream.position !== 1) await settled();
  first.cut(4401, "auth_failed");
  const second = await world.connected(2);
  second.subscribed(0, true);
  second.envelope(2);
  assert.deepEqual(await given, [1, 2]);
  assert.deepEqual(world.sockets.map(({ query }) => query.get("token")), ["t1", "t2"]);

  const other = world.stream({ token: "fixed" });
  const failing = other.next();
  (await world.connected(3)).cut(4401, "auth_failed");
  await assert.rejects(failing, { name: "EventStreamError", code: 4401, reason: "auth_failed" });
});

test("whom the node does not want hears so, and stays away", async () => {
  for (const [code, reason] of [[4400, "frame_invalid"], [4403, "permission_denied"], [4410, "taken_over"], [4422, "filter_invalid"]]) {
    const world = new World();
    const stream = world.stream({});
    const failing = stream.next();
    const socket = await world.connected();
    socket.hear("error", { error: { code: "acl_denied", category: "acl", message: "no", data: {} } });
    socket.cut(code, reason);
    await assert.rejects(failing, (error) => error instanceof EventStreamError && error.message === `${reason}: no`);
    assert.deepEqual(await stream.next(), { done: true, value: undefined });
    assert.equal(world.sockets.length, 1);
  }
});

test("a refused upgrade is asked about over HTTP, and waited out if it passes", async () => {
  const world = new World();
  let refusals = 2;
  world.upgrades = () => (refusals -= 1) < 0;
  world.pages = [{ status: 503, code: "network_rejected", retryable: true }];
  const stream = world.stream({});
  const given = next(stream, 1);
  const socket = await world.connected(3);
  socket.subscribed(0);
  socket.envelope(1);
  assert.deepEqual(await given, [1]);
  assert.equal(world.asked.length, 2);
  assert.ok(world.pauses[1] > 200 && world.pauses.length === 2, String(world.pauses));

  const gone = new World();
  gone.upgrades = () => false;
  gone.pages = [{ status: 404, code: "app_not_found", detail: "there is no app 'x'" }];
  await assert.rejects(gone.stream({ app: "x" }).next(), { code: 404, reason: "app_not_found" });
});

test("pauses grow, and closing ends one", async () => {
  const world = new World();
  world.upgrades = () => false;
  const stream = world.stream({ subscriptionType: "system" });
  const ending = stream.next();
  while (world.pauses.length < 6) await settled();
  stream.close();
  assert.deepEqual(await ending, { done: true, value: undefined });
  const longest = [0, 1, 2, 3, 4, 5].map((number) => 250 * 2 ** number);
  world.pauses.slice(0, 6).forEach((ms, number) => assert.ok(ms >= longest[number] / 2 && ms <= longest[number]));
});

test("pauses grow where pages are answered and sockets are not", async () => {
  const world = new World();
  world.upgrades = () => false;
  const stream = world.stream({ since: 0 });
  const ending = stream.next();
  while (world.pauses.length < 6) await settled();
  stream.close();
  await ending;
  assert.ok(world.pauses[5] >= 125 * 2 ** 5);
});

test("two who wait at once get one each", async () => {
  const world = new World();
  const stream = world.stream();
  const waiting = [stream.next(), stream.next()];
  const socket = await world.connected();
  socket.subscribed(0);
  await settled();
  socket.envelope(1);
  await settled();
  socket.envelope(2);
  const got = await Promise.all(waiting);
  assert.deepEqual(got.map(({ value }) => value.seq).sort(), [1, 2]);
  stream.close();
});

test("an empty list of objects is a mistake, and not everything", () => {
  assert.throws(() => new World().stream({ objects: [] }), { reason: "filter_invalid" });
});

test("a position that is gone is said to be", async () => {
  const world = new World();
  world.pages = [{ status: 410, code: "log.position_trimmed", detail: "gone" }];
  await assert.rejects(world.stream({ since: 1 }).next(), { code: 410, reason: "log.position_trimmed" });
});
