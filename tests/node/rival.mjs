// The insieme server as its package has it, with its SQLite store on a file and its own defaults of durability (WAL, FULL).
//
//     node rival.mjs FILE
//
// It says where it is on one line of JSON, believes everybody, and ends when its standard input does. Only the guard against
// too many messages a second is off: it is measured, not attacked.

import { DatabaseSync } from "node:sqlite";
import { createSqliteSyncStore, createSyncServer, createWsServerRuntime } from "insieme/server";
import { WebSocketServer } from "ws";

const database = new DatabaseSync(process.argv[2]);
const store = createSqliteSyncStore(database);
await store.init();

const syncServer = createSyncServer({
  auth: { verifyToken: async (token) => ({ clientId: token, claims: {} }) },
  authz: { authorizeProject: async () => true },
  validation: { validate: async () => {} },
  store,
  clock: { now: () => Date.now() },
  limits: { maxInboundMessagesPerWindow: 1_000_000_000, maxEnvelopeBytes: 16 * 1024 * 1024 },
});
const wsServer = new WebSocketServer({ host: "127.0.0.1", port: 0, perMessageDeflate: false });
createWsServerRuntime({ wsServer, syncServer });
wsServer.on("listening", () => {
  process.stdout.write(`${JSON.stringify({ url: `ws://127.0.0.1:${wsServer.address().port}` })}\n`);
});

process.stdin.resume();
process.stdin.on("end", () => process.exit(0));
