// Unmodified insieme clients, driven by lines of JSON.
//
// A command comes in on a line of standard input: {"n": 1, "client": "alice", "do": "start", ...}. Its outcome goes out as
// {"n": 1, "ok": ...} or {"n": 1, "failed": "..."}, and whatever a client says by itself as {"client": "alice", "event": ...}.
// Transports and stores are the packages' own. What is wrapped around them stands in for the world: a store that is slow
// ("hold" and "release"), a transport whose messages are changed on their way ("alter").

import { createInterface } from "node:readline";
import { DatabaseSync } from "node:sqlite";
import * as current from "insieme/node";
import * as legacy from "insieme-legacy/server";

const clients = new Map();

const say = (message) => process.stdout.write(`${JSON.stringify(message)}\n`);

// Pages are told by what is needed of them: a hundred thousand events are too many to print.
const brief = ({ type, payload }) =>
  type !== "sync_page"
    ? payload
    : {
        ids: payload.events.length > 50 ? [] : payload.events.map((event) => event.id),
        count: payload.events.length,
        hasMore: payload.hasMore,
        nextSinceCommittedId: payload.nextSinceCommittedId,
        syncToCommittedId: payload.syncToCommittedId,
      };

const slowable = (store) => {
  let open = Promise.resolve();
  let release = () => {};
  const wrapped = {
    ...store,
    applyCommittedBatch: async (batch) => {
      await open;
      await store.applyCommittedBatch(batch);
    },
  };
  const hold = () => {
    open = new Promise((resolve) => {
      release = resolve;
    });
  };
  return { store: wrapped, hold, release: () => release() };
};

const altered = (transport, alter) => ({
  ...transport,
  send: (message) => transport.send({ ...message, ...alter }),
});

const storeOf = (library, path) => {
  if (path === undefined) {
    const store = library.createInMemoryClientStore();
    return { store, shut: () => {} };
  }
  const database = new DatabaseSync(path);
  return { store: library.createSqliteClientStore(database), shut: () => database.close() };
};

const create = ({ client: name, url, token, clientId, projectId, partitions, path, reconnect, submitBatch, alter }) => {
  const library = partitions === undefined ? current : legacy;
  const { store, shut } = storeOf(library, path);
  const slow = slowable(store);
  const transport = library.createBrowserWebSocketTransport({
    url,
    logger: ({ event, code, reason }) => {
      if (event === "socket_closed") say({ client: name, event, payload: { code, reason } });
    },
  });
  const client = library.createSyncClient({
    transport: alter === undefined ? transport : altered(transport, alter),
    store: slow.store,
    token,
    clientId,
    projectId,
    partitions,
    reconnect,
    submitBatch,
    onEvent: (event) => say({ client: name, event: event.type, payload: brief(event) }),
    logger: ({ event, ...rest }) => {
      if (event === "sync_requested" || event === "submit_sent") say({ client: name, event, payload: rest });
    },
  });
  clients.set(name, { client, store, slow, shut });
};

const committedOf = async (store) =>
  typeof store.listCommittedAfter === "function"
    ? store.listCommittedAfter({ sinceCommittedId: 0 })
    : store._debug.getCommitted();

const draftsOf = async (store) => (await store.loadDraftsOrdered()).map((draft) => draft.id);

const verbs = {
  start: ({ client }) => client.start(),
  stop: ({ client }) => client.stop(),
  submit: ({ client }, { events }) => client.submitEvents(events),
  submitOne: ({ client }, { event }) => client.submitEvent(event),
  sync: ({ client }, { since }) => client.syncNow(since === undefined ? {} : { sinceCommittedId: since }),
  flush: ({ client }) => client.flushDrafts(),
  setPartitions: ({ client }, { partitions, since }) =>
    client.setPartitions(partitions, since === undefined ? {} : { sinceCommittedId: since }),
  status: ({ client }) => client.getStatus(),
  committed: ({ store }) => committedOf(store),
  count: async ({ store }) => (await committedOf(store)).length,
  cursor: ({ store }) => store.loadCursor(),
  drafts: ({ store }) => draftsOf(store),
  hold: ({ slow }) => slow.hold(),
  release: ({ slow }) => slow.release(),
};

const obey = async (command) => {
  if (command.do === "create") return create(command);
  return verbs[command.do](clients.get(command.client), command);
};

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  // Not one after the other: a client may be waiting for something that the next command brings.
  obey(command).then(
    (ok) => say({ n: command.n, ok: ok ?? null }),
    (error) => say({ n: command.n, failed: String(error?.message ?? error) }),
  );
}

for (const { client, slow, shut } of clients.values()) {
  slow.release();
  await client.stop();
  shut();
}
