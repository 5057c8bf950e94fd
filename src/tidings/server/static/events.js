/**
 * The events of a Tidings node as they happen, in a browser or in Node.js 22 and newer. No dependency, no build step.
 *
 *     import { EventStream } from "/client/events.js";
 *
 *     const stream = new EventStream(location.origin, { token, app: "shop", domain: "orders", since: saved });
 *     for await (const envelope of stream) {
 *       show(envelope);
 *       save(stream.position);
 *     }
 *
 * Every graph envelope that the bearer of the token may see is given once, in the order of seqs, across broken connections and restarts of the
 * node. A connection that breaks is opened again after a pause. It is resumed where the node still knows how; where it does not, what was missed
 * is read over HTTP (`GET /v1/envelopes`) and joined with what the new connection brings. Events of other classes are nowhere but in the node's
 * memory: if a connection cannot be resumed some may be missing, and `gapCount` says so.
 *
 * `envelope.seq` is the seq of the record that a graph envelope tells of: what it was is read with `GET /v1/events/{seq}`. An event that names no
 * `objects` is told to nobody here. An envelope is acknowledged when the program asks for the next one. A program that is too slow for the node's buffer loses the connection, and
 * goes on by itself with what it has not seen.
 */

const PAUSE_MS = 250;
const PAUSE_MS_MAX = 30_000;
/** The pause after a close for a full buffer: it doubles each time, and begins again when a connection has lasted for LASTING_MS. */
const OVERFLOW_PAUSE_MS = 1_000;
const LASTING_MS = 60_000;
const CONNECT_MS_MAX = 10_000;
const PAGE_MS_MAX = 60_000;
const ACKS_TOGETHER_MAX = 64;

/** What to do after each close of the gateway; any other one is a cut, and resumed. */
const AFTER_CLOSE = new Map([
  [4400, "no"],
  [4401, "new_token"],
  [4403, "no"],
  [4408, "resume"],
  [4409, "catch_up"],
  [4410, "no"],
  [4413, "resume"],
  [4422, "no"],
  [4429, "resume"],
  [4503, "catch_up"],
  [1001, "catch_up"],
  [1011, "catch_up"],
]);

/** The stream has ended for good: `code` is the close code or the HTTP status, `reason` the node's own word for it. */
export class EventStreamError extends Error {
  constructor(code, reason, message) {
    super(message ? `${reason}: ${message}` : reason);
    this.name = "EventStreamError";
    this.code = code;
    this.reason = reason;
  }
}

/** Where a graph envelope stands: its seq, and which part it is if one record took several. */
class Place {
  constructor(seq, part, isLast) {
    this.seq = seq;
    this.part = part;
    this.isLast = isLast;
  }

  /** Behind everything that a seq has. */
  static after(seq) {
    return new Place(seq + 1, 0, false);
  }

  static of(envelope) {
    const seq = envelope.sequence_anchor.global_seq;
    if (seq === undefined) return null;
    const { part, parts } = envelope.payload_summary;
    return new Place(seq, part ?? 1, part === parts);
  }

  /** The last seq of which nothing is missing. */
  get wholeSeq() {
    return this.isLast ? this.seq : this.seq - 1;
  }

  isBehind(other) {
    return this.seq > other.seq || (this.seq === other.seq && this.part > other.part);
  }
}

export class EventStream {
  #base;
  #token;
  #shown;
  #wanted;
  #graphTypes;
  #hasGraph;
  #queue = [];
  #reached = null;
  #given = null;
  #isBehind = false;
  #behindUntil = null;
  #epoch = null;
  #socket = null;
  #socketCount = 0;
  #messages = [];
  #end = null;
  #step = null;
  #wake = null;
  #resumeToken = null;
  #receivedCount = 0;
  #last = null;
  #ackCount = 0;
  #acksTogether = 1;
  #refusal = "";
  #failures = 0;
  #overflows = 0;
  #subscribedAt = 0;
  #isClosed = false;
  #now;
  #timers;
  #WebSocket;
  #fetch;

  /** How often a connection could not be resumed: events of other classes than graph may have been missed then. */
  gapCount = 0;

  /**
   * @param {string} url The node's address, as `location.origin`.
   * @param {object} options
   * @param {string|function(): (string|Promise<string>)} [options.token] What to show the node, or what gets a fresh token for each connection.
   * @param {string} [options.app] The app whose events are wanted.
   * @param {string} [options.subscriptionType] The class, or `app.<slug>`; `eventType` narrows it to one type.
   * @param {string} [options.eventType]
   * @param {string[]} [options.channels] Several families (`graph.*`) or types instead.
   * @param {string} [options.domain] Only of this topic.
   * @param {string[]} [options.objects] Only of these, each `<type>:<id>`.
   * @param {string} [options.peer] Only network events of this peer.
   * @param {number} [options.since] Give the graph envelopes after this seq first; only what comes from now on if left out.
   * @param {object} [options.platform] `WebSocket`, `fetch`, `setTimeout` and `clearTimeout` in place of the global ones, for tests.
   */
  constructor(url, options = {}) {
    const { app = "default", subscriptionType = "graph", eventType, channels, domain, objects, peer, since, platform = {} } = options;
    this.#base = String(url).replace(/\/+$/, "");
    this.#token = options.token;
    this.#wanted = { type: "subscribe", app_id: app };
    const rest = {
      subscription_type: channels === undefined ? subscriptionType : undefined,
      event_type: eventType,
      channels,
      domain_id: domain,
      object_ids: objects,
      peer_identity_id: peer,
    };
    for (const [name, value] of Object.entries(rest)) if (value !== undefined) this.#wanted[name] = value;
    if (objects?.length === 0) throw new EventStreamError(4422, "filter_invalid", "objects names none: leave it out for all");
    const named = channels ?? [subscriptionType];
    this.#graphTypes = [eventType, ...named].filter((name) => name?.startsWith("graph.") && name !== "graph.*");
    this.#hasGraph = named.some((name) => name.split(".")[0] === "graph");
    if (since !== undefined && since !== null) {
      this.#reached = this.#given = Place.after(since);
      this.#isBehind = this.#hasGraph;
    }
    this.#WebSocket = platform.WebSocket ?? globalThis.WebSocket;
    this.#fetch = platform.fetch ?? globalThis.fetch.bind(globalThis);
    this.#now = platform.now ?? (() => globalThis.performance.now());
    this.#timers = {
      set: platform.setTimeout ?? globalThis.setTimeout.bind(globalThis),
      clear: platform.clearTimeout ?? globalThis.clearTimeout.bind(globalThis),
    };
  }

  /** Every graph envelope up to this seq was given, the last one included: where to begin after a restart of the program. */
  get position() {
    return this.#given === null ? null : this.#given.wholeSeq;
  }

  /** Resolves when nothing that is committed from then on is missed; iterating does so by itself. */
  async opened() {
    while (this.#reached === null && !this.#isClosed) await this.#goOn();
  }

  [Symbol.asyncIterator]() {
    return this;
  }

  async next() {
    this.#acknowledge();
    for (;;) {
      while (this.#queue.length === 0) {
        if (this.#isClosed) return { done: true, value: undefined };
        await this.#goOn();
      }
      const received = this.#queue.shift();
      if (received.place !== null) this.#given = received.place;
      if (received.envelope !== null) {
        this.#last = received;
        return { done: false, value: received.envelope };
      }
    }
  }

  /** Leaving a `for await` loop closes the stream. */
  async return() {
    this.close();
    return { done: true, value: undefined };
  }

  /** End the subscription. What was given last counts as done. Closing twice is fine. */
  close() {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#acknowledge(true);
    this.#hangUp();
    this.#stir();
  }

  #acknowledge(isFinal = false) {
    const last = this.#last;
    this.#last = null;
    if (last === null || this.#socket === null || last.socket !== this.#socket) return;
    this.#ackCount += 1;
    if (isFinal || this.#ackCount >= this.#acksTogether || this.#queue.length === 0) {
      this.#ackCount = 0;
      this.#send({ type: "ack", resume_token: last.envelope.resume_token });
    }
  }

  #send(frame) {
    if (this.#socket.readyState === 1) this.#socket.send(JSON.stringify(frame));
  }

  // Where the next envelopes come from

  /** Wait for the next step, together with whoever else does. */
  async #goOn() {
    this.#step ??= this.#takeStep().finally(() => {
      this.#step = null;
    });
    await this.#step;
  }

  /** One step towards the next envelope: a page, a connection, or what has come on it. */
  async #takeStep() {
    if (this.#isBehind) {
      await this.#readPage();
    } else if (this.#socket === null) {
      await this.#subscribe();
    } else if (this.#messages.length > 0) {
      // What was missed before this connection comes before what it brings.
      while (this.#messages.length > 0 && !this.#isBehind) this.#take(this.#messages.shift());
    } else if (this.#end !== null) {
      await this.#lost(this.#end);
    } else {
      await new Promise((resolve) => {
        this.#wake = resolve;
      });
    }
  }

  #stir() {
    const wake = this.#wake;
    this.#wake = null;
    wake?.();
  }

  async #freshToken() {
    return typeof this.#token === "function" ? await this.#token() : this.#token;
  }

  async #readPage() {
    const wanted = this.#wanted;
    const query = new URLSearchParams({ since: String(this.#reached.wholeSeq), app: wanted.app_id });
    if (this.#behindUntil !== null) query.set("until", String(this.#behindUntil));
    if (this.#epoch !== null) query.set("epoch", this.#epoch);
    if (wanted.domain_id !== undefined) query.set("domain_id", wanted.domain_id);
    for (const each of wanted.object_ids ?? []) query.append("object_id", each);
    for (const each of this.#graphTypes) query.append("event_type", each);
    const body = await this.#ask(query);
    if (body === null) return;
    // The last page says nothing of the socket, which may be refused each time.
    if (!body.at_end) this.#failures = 0;
    this.#epoch = body.epoch;
    for (const envelope of body.envelopes) this.#put(envelope, null);
    this.#reach(body.next_since);
    if (body.at_end) {
      this.#isBehind = false;
      this.#behindUntil = null;
    }
  }

  /** A page; `null` if there is none now, after a pause. */
  async #ask(query) {
    let answer;
    let body;
    try {
      this.#shown ??= await this.#freshToken();
      const headers = this.#shown ? { authorization: `Bearer ${this.#shown}` } : {};
      answer = await this.#fetch(`${this.#base}/v1/envelopes?${query}`, { headers, cache: "no-store", signal: AbortSignal.timeout(PAGE_MS_MAX) });
      body = await answer.json();
    } catch (problem) {
      await this.#lost({ code: 1006, reason: String(problem) });
      return null;
    }
    if (answer.ok) return body;
    this.#refusal = body.detail ?? "";
    if (answer.status === 401) await this.#lost({ code: 4401, reason: body.code });
    else if (body.retryable || answer.status >= 500) await this.#lost({ code: 1006, reason: body.code });
    else throw this.#failed(answer.status, body.code);
    return null;
  }

  /** Everything up to a seq has come. */
  #reach(seq) {
    const place = Place.after(seq);
    if (this.#reached === null || place.isBehind(this.#reached)) {
      this.#reached = place;
      this.#queue.push({ place, envelope: null, socket: null });
    }
  }

  /** Open a connection; its answer to the subscription is the first message. */
  async #subscribe() {
    let token;
    try {
      token = await this.#freshToken();
    } catch (problem) {
      await this.#lost({ code: 1006, reason: String(problem) });
      return;
    }
    if (this.#isClosed) return;
    const query = new URLSearchParams({ app: this.#wanted.app_id });
    // A browser sends no header of ours with an upgrade.
    if (token) query.set("token", token);
    const socket = new this.#WebSocket(`${this.#base.replace(/^http/, "ws")}/events?${query}`);
    this.#socket = socket;
    this.#socketCount += 1;
    this.#receivedCount = 0;
    this.#ackCount = 0;
    this.#messages = [];
    this.#end = null;
    let isOpen = false;
    const isCurrent = () => socket === this.#socket;
    const tooLate = this.#timers.set(() => {
      if (!isOpen && isCurrent()) {
        this.#end = { code: 1006, reason: "no connection in time" };
        socket.close();
        this.#stir();
      }
    }, CONNECT_MS_MAX);
    socket.onopen = () => {
      isOpen = true;
      this.#timers.clear(tooLate);
      if (!isCurrent()) return;
      if (this.#resumeToken !== null) this.#send({ type: "resume", resume_token: this.#resumeToken });
      this.#send(this.#wanted);
    };
    socket.onmessage = (message) => {
      if (!isCurrent()) return;
      this.#messages.push(message.data);
      this.#stir();
    };
    socket.onclose = (close) => {
      this.#timers.clear(tooLate);
      if (!isCurrent() || this.#end !== null) return;
      this.#end = { code: close.code, reason: close.reason, wasOpen: isOpen };
      this.#stir();
    };
    socket.onerror = () => {};
  }

  #take(message) {
    const frame = JSON.parse(message);
    if (frame.event === "error") {
      this.#refusal = frame.payload.error.message;
    } else if (frame.event === "subscribed") {
      this.#subscribed(frame.payload);
    } else {
      this.#receivedCount += 1;
      this.#resumeToken = frame.payload.resume_token;
      this.#put(frame.payload, this.#socket);
    }
  }

  #subscribed(answer) {
    this.#failures = 0;
    this.#subscribedAt = this.#now();
    this.#acksTogether = Math.max(1, Math.min(ACKS_TOGETHER_MAX, Math.floor(answer.per_connection / 4)));
    if (answer.resumed) return;
    this.#resumeToken = null;
    if (this.#reached === null) {
      this.#reach(answer.since);
      return;
    }
    if (this.#socketCount > 1) this.gapCount += 1;
    if (this.#hasGraph && this.#reached.wholeSeq < answer.since) {
      this.#isBehind = true;
      this.#behindUntil = answer.since;
    }
  }

  /** Queue an envelope, unless it came before: a record that took several may be read again from its first part on. */
  #put(envelope, socket) {
    const place = Place.of(envelope);
    Object.defineProperty(envelope, "seq", { value: place?.seq ?? null });
    if (place !== null) {
      if (this.#reached !== null && !place.isBehind(this.#reached)) return;
      this.#reached = place;
    }
    this.#queue.push({ place, envelope, socket });
  }

  // When a connection is over

  async #lost({ code, reason, wasOpen = true }) {
    this.#hangUp();
    if (this.#isClosed) return;
    const advice = AFTER_CLOSE.get(code) ?? "resume";
    if (advice === "no") throw this.#failed(code, reason);
    if (advice === "new_token") {
      // A token that is always the same would be refused again.
      if (typeof this.#token !== "function") throw this.#failed(code, reason || "auth_failed");
      if (this.#failures > 0) await this.#pause();
    }
    const isStuck = code === 4413 && this.#receivedCount === 0; // resuming there would end in the same way again
    if (isStuck || advice === "catch_up") this.#resumeToken = null;
    this.#behindUntil = null;
    // A refused upgrade looks like a cut to a browser: asking over HTTP tells which it was.
    this.#isBehind = this.#hasGraph && this.#reached !== null && (this.#resumeToken === null || !wasOpen);
    if (this.#isBehind) this.#resumeToken = null;
    else if (!wasOpen && (await this.#ask(new URLSearchParams({ app: this.#wanted.app_id, limit: "1" }))) === null) return;
    if (advice !== "new_token" && code !== 4409) await this.#pause(this.#overflowPause(code));
    this.#failures += 1;
  }

  #failed(code, reason) {
    this.#isClosed = true;
    this.#hangUp();
    return new EventStreamError(code, reason, this.#refusal);
  }

  /** How long to wait at least: a node denies subscriptions to whoever overflows and comes back at once. */
  #overflowPause(code) {
    if (this.#now() - this.#subscribedAt > LASTING_MS) this.#overflows = 0;
    if (code !== 4413) return 0;
    this.#overflows += 1;
    return Math.min(PAUSE_MS_MAX, OVERFLOW_PAUSE_MS * 2 ** (this.#overflows - 1));
  }

  async #pause(least = 0) {
    const longest = Math.min(PAUSE_MS_MAX, PAUSE_MS * 2 ** this.#failures);
    await new Promise((resolve) => {
      const timer = this.#timers.set(resolve, least + longest * (0.5 + Math.random() / 2));
      this.#wake = () => {
        this.#timers.clear(timer);
        resolve();
      };
    });
    this.#wake = null;
  }

  #hangUp() {
    const socket = this.#socket;
    this.#socket = null;
    this.#shown = undefined;
    this.#messages = [];
    this.#end = null;
    if (socket !== null && socket.readyState < 2) socket.close(1000);
  }
}
