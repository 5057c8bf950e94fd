/**
 * The node's page: its health, and its HTTP API and sockets as its own OpenAPI and AsyncAPI documents describe them.
 *
 * All text from elsewhere becomes text nodes, never markup. Nothing is loaded but from this node.
 */

const HEALTH_EVERY_MS = 10_000;
const TOKEN = "tidings.token";

const at = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text. */
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((each) => each !== undefined && each !== ""));
  return made;
}

/** Text in which what stands in backticks is code. */
const prose = (text = "") => text.split(/`+/).map((each, index) => (index % 2 ? el("code", {}, each) : each));

/** A part that is made when it is opened for the first time. */
function folded(attributes, summary, fill) {
  const made = el("details", attributes, el("summary", {}, ...summary));
  made.addEventListener("toggle", () => made.open && made.childElementCount === 1 && made.append(...fill()));
  return made;
}

function headers(more = {}) {
  const token = at("token").value.trim();
  return { accept: "application/json", ...(token ? { authorization: `Bearer ${token}` } : {}), ...more };
}

// Health

async function showHealth() {
  const state = at("ready");
  try {
    const found = await (await fetch("/readyz", { headers: headers(), cache: "no-store" })).json();
    const log = found.seq ? `the last event in the log has seq ${found.seq}` : "the log is empty";
    state.textContent = `${found.ready ? "ready" : "not ready"}; ${log}`;
    state.className = `state ${found.ready ? "good" : "bad"}`;
    const listed = [...found.reasons, ...found.warnings.map((each) => ({ ...each, isWarning: true }))];
    at("reasons").replaceChildren(
      ...listed.map((each) => el("li", {}, each.isWarning ? "warning: " : "", el("code", {}, each.code), ` ${each.detail}`)),
    );
  } catch {
    state.textContent = "no answer: the node has stopped, or cannot be reached";
    state.className = "state bad";
    at("reasons").replaceChildren();
  }
}

async function checkToken() {
  sessionStorage.setItem(TOKEN, at("token").value.trim());
  const answer = await fetch("/v1/whoami", { headers: headers() });
  const found = await answer.json();
  const who = answer.ok ? `The node believes it: ${found.subject}` : `Not believed: ${found.detail}`;
  at("whoami").textContent = who;
  at("whoami").className = answer.ok ? "good" : "bad";
  showHealth();
}

// Schemas

const resolved = (schema, parts) => (schema?.$ref ? (parts[schema.$ref.split("/").at(-1)] ?? {}) : (schema ?? {}));
const nameOf = (schema) => schema.$ref.split("/").at(-1).split(".").at(-1);

/** A schema in a few words. */
function words(schema) {
  if (schema.$ref) return nameOf(schema);
  if (schema.anyOf) return schema.anyOf.map(words).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (schema.type === "array") return `list of ${words(schema.items ?? {})}`;
  const bounds = [
    ["minimum", "from"],
    ["exclusiveMinimum", "above"],
    ["maximum", "to"],
    ["minLength", "at least"],
    ["maxLength", "at most"],
    ["maxItems", "at most"],
  ];
  const said = bounds.filter(([key]) => key in schema).map(([key, word]) => `${word} ${schema[key]}`);
  return [schema.type ?? "anything", ...said].join(" ");
}

/** The schemas with properties that one leads to. */
function inside(schema, parts) {
  if (schema.anyOf) return [...new Set(schema.anyOf.flatMap((each) => inside(each, parts)))];
  if (schema.type === "array") return inside(schema.items ?? {}, parts);
  const found = resolved(schema, parts);
  if (found !== schema && !found.properties) return inside(found, parts);
  return found.properties ? [found] : [];
}

function schemaTree(schema, parts) {
  const objects = inside(schema, parts);
  return objects.map((each) => {
    const required = new Set(each.required ?? []);
    const rows = Object.entries(each.properties).map(([name, property]) => {
      const mark = required.has(name) ? "" : el("small", {}, " (may be left out)");
      const head = [el("code", {}, name), " ", el("span", { class: "muted" }, words(property)), mark];
      const note = property.description ?? "";
      if (!inside(property, parts).length) return el("li", {}, ...head, note && ` ${note}`);
      return el("li", {}, folded({}, head, () => schemaTree(property, parts)));
    });
    const title = objects.length > 1 && each.title ? [el("h4", {}, each.title)] : [];
    const note = each.description ? [el("p", { class: "muted" }, ...prose(each.description))] : [];
    return el("div", {}, ...title, ...note, el("ul", { class: "schema" }, ...rows));
  });
}

/** A value to begin with: what has to be there, empty. */
function sample(schema, parts, depth = 0) {
  const found = resolved(schema, parts);
  if ("const" in found) return found.const;
  if ("default" in found && !found.properties) return found.default;
  if (found.enum) return found.enum[0];
  if (found.anyOf) return sample(found.anyOf[0], parts, depth);
  if (found.type === "array") return [];
  if (found.type === "integer" || found.type === "number") return found.minimum ?? 0;
  if (found.type === "boolean") return false;
  if (found.type === "string") return "";
  const listed = depth < 6 ? (found.required ?? []) : [];
  return Object.fromEntries(listed.map((name) => [name, sample(found.properties[name], parts, depth + 1)]));
}

// HTTP

function operation(path, method, described, parts) {
  const summary = [
    el("span", { class: "method mono" }, method.toUpperCase()),
    el("code", {}, path),
    " ",
    el("span", { class: "muted" }, ...prose(described.summary)),
  ];
  const made = folded({ id: described.operationId }, summary, () => [
    ...trial(path, method, described, parts),
    ...answers(described, parts),
  ]);
  made.dataset.words = `${method} ${path} ${described.operationId} ${described.summary} ${described.tags}`.toLowerCase();
  return made;
}

/** Each answer that is not a refusal, and then all refusals, whose body is the same. */
function answers(described, parts) {
  const listed = Object.entries(described.responses).map(([status, answer]) => {
    const [media, content] = Object.entries(answer.content ?? {})[0] ?? ["", {}];
    return { status, answer, media, schema: content.schema ?? {} };
  });
  const isRefusal = (each) => each.media === "application/problem+json";
  const shown = listed.filter((each) => !isRefusal(each)).map(({ status, answer, media, schema }) => {
    const head = [el("code", {}, status), ` ${answer.description} `, el("small", {}, media)];
    return folded({}, head, () => [el("p", {}, words(schema)), ...schemaTree(schema, parts)]);
  });
  const refusals = listed.filter(isRefusal);
  if (!refusals.length) return shown;
  const head = [el("code", {}, refusals.map((each) => each.status).join(", ")), " Refused ", el("small", {}, refusals[0].media)];
  const names = refusals.map((each) => el("li", {}, el("code", {}, each.status), ` ${each.answer.description}`));
  return [...shown, folded({}, head, () => [el("ul", {}, ...names), ...schemaTree(refusals[0].schema, parts)])];
}

/** Fields for a request, the button that sends it, and its answer. */
function trial(path, method, described, parts) {
  const inputs = described.parameters.map((parameter) => ({ parameter, input: field(parameter) }));
  const rows = inputs.flatMap(({ parameter, input }) => [
    el("label", { for: input.id }, el("code", {}, parameter.name), parameter.required ? " *" : ""),
    el("div", {}, input, el("small", {}, ...prose(parameter.description))),
  ]);
  const [media, content] = Object.entries(described.requestBody?.content ?? {})[0] ?? [];
  const given = content && (content.example ?? sample(content.schema, parts));
  const text = content && JSON.stringify(given, null, 2);
  const body = content && el("textarea", { rows: Math.min(14, text.split("\n").length + 1), "aria-label": "body", spellcheck: "false" }, text);
  const command = el("pre", {});
  const answer = el("div", { role: "status" });
  const request = () => {
    let target = path;
    const query = new URLSearchParams();
    const more = body ? { "content-type": media } : {};
    for (const { parameter, input } of inputs) {
      const value = input.value;
      if (parameter.in === "path") target = target.replace(new RegExp(`\\{${parameter.name}(:\\w+)?\\}`), encodeURIComponent(value));
      else if (value && parameter.in === "header") more[parameter.name.toLowerCase()] = value;
      else if (value) for (const each of isList(parameter) ? value.split(",") : [value]) query.append(parameter.name, each.trim());
    }
    return { target: query.size ? `${target}?${query}` : target, more };
  };
  const redraw = () => (command.textContent = curl(method, request(), body?.value, described.security?.length !== 0));
  const send = async () => {
    const { target, more } = request();
    const started = performance.now();
    try {
      const got = await fetch(target, { method: method.toUpperCase(), headers: headers(more), body: body?.value });
      const said = await got.text();
      const ms = Math.round(performance.now() - started);
      answer.replaceChildren(
        el("p", { class: `state ${got.ok ? "good" : "bad"}` }, `${got.status} in ${ms} ms`),
        el("pre", { tabindex: "0", "aria-label": "answer" }, pretty(said)),
      );
    } catch (error) {
      answer.replaceChildren(el("p", { class: "state bad" }, `no answer: ${error.message}`));
    }
  };
  const form = el("div", { oninput: redraw }, el("div", { class: "fields" }, ...rows), body ?? "");
  redraw();
  const shape = content ? [folded({}, [el("code", {}, "body"), ` ${words(content.schema)} `, el("small", {}, media)], () => schemaTree(content.schema, parts))] : [];
  return [form, el("p", {}, el("button", { type: "button", onclick: send }, "Send")), command, answer, ...shape];
}

const isList = (parameter) => resolved(parameter.schema, {}).type === "array";
let fieldCount = 0;

function field(parameter) {
  const hint = isList(parameter) ? `${words(parameter.schema)}, with commas between` : words(parameter.schema).replace(" or null", "");
  return el("input", { id: `field-${(fieldCount += 1)}`, placeholder: hint, autocomplete: "off", spellcheck: "false" });
}

function curl(method, { target, more }, body, needsToken) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const parts = ["curl -s", quoted(location.origin + target)];
  if (method !== "get" && !(method === "post" && body !== undefined)) parts.push(`-X ${method.toUpperCase()}`);
  if (needsToken) parts.push('-H "Authorization: Bearer $TIDINGS_TOKEN"');
  for (const [name, value] of Object.entries(more)) parts.push(`-H ${quoted(`${name}: ${value}`)}`);
  if (body !== undefined) parts.push(`-d ${quoted(compact(body))}`);
  return parts.join(" ");
}

function compact(text) {
  try {
    return JSON.stringify(JSON.parse(text));
  } catch {
    return text;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function showOperations(document_) {
  at("version").textContent = document_.info.version;
  const parts = document_.components.schemas;
  const all = Object.entries(document_.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, described]) => ({ tag: described.tags[0], made: operation(path, method, described, parts) })),
  );
  const sections = document_.tags.map(({ name }) =>
    el("div", {}, el("h3", {}, name), ...all.filter((each) => each.tag === name).map((each) => each.made)),
  );
  at("operations").replaceChildren(...sections);
  at("filter").addEventListener("input", () => {
    const wanted = at("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const { made } of all) made.hidden = !wanted.every((word) => made.dataset.words.includes(word));
    for (const section of sections) section.hidden = !section.querySelector("details[data-words]:not([hidden])");
  });
}

// Sockets

function showChannels(document_) {
  const { messages, schemas } = document_.components;
  const last = (reference) => reference.$ref.split("/").at(-1);
  const channels = Object.entries(document_.channels);
  at("sockets-list").replaceChildren(
    ...channels.map(([name, channel]) =>
      el("tr", {}, el("td", {}, el("a", { href: `#channel-${name}` }, channel.address)), el("td", {}, "WebSocket. ", ...prose(channel.summary))),
    ),
  );
  const shown = channels.map(([name, channel]) => {
    const listed = (direction) =>
      document_.operations[`${name}.${direction}`].messages.map((each) => {
        const message = messages[`${name}.${last(each)}`];
        const head = [el("code", {}, message.name), " ", el("span", { class: "muted" }, ...prose(message.summary))];
        return folded({}, head, () => schemaTree(message.payload, schemas));
      });
    return folded({ id: `channel-${name}` }, [el("code", {}, channel.address), " ", ...prose(channel.summary)], () => [
      el("h4", {}, "You send"),
      ...listed("receive"),
      el("h4", {}, "The node sends"),
      ...listed("send"),
    ]);
  });
  at("channels").replaceChildren(...shown);
}

function openLinked() {
  const target = at(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) {
    target.open = true;
    target.scrollIntoView();
  }
}

/**
 * Take the token of the address, as `tidings serve --dev` prints it, and remove it from the address.
 *
 * A link may come from anybody. So a token that this tab has already is not replaced without asking.
 */
function takeToken() {
  const linked = /^#token=([\w.-]+)$/.exec(location.hash)?.[1];
  if (linked === undefined) return;
  history.replaceState(null, "", location.pathname);
  const current = sessionStorage.getItem(TOKEN);
  if (current && current !== linked) offerToken(linked);
  else useToken(linked);
}

function useToken(token) {
  at("token").value = token;
  checkToken();
}

function offerToken(token) {
  const answer = (use) => () => {
    notice.remove();
    if (use) useToken(token);
  };
  const notice = el(
    "p",
    { id: "offered", role: "alert" },
    "The link to this page has another token than the one in use. ",
    el("button", { type: "button", id: "keep", onclick: answer(false) }, "Keep mine"),
    " ",
    el("button", { type: "button", id: "replace", onclick: answer(true) }, "Use the link's"),
  );
  at("whoami").before(notice);
}

at("token").value = sessionStorage.getItem(TOKEN) ?? "";
takeToken();
at("token").addEventListener("change", checkToken);
at("check").addEventListener("click", checkToken);
addEventListener("hashchange", openLinked);
document.addEventListener("visibilitychange", () => document.hidden || showHealth());
setInterval(() => document.hidden || showHealth(), HEALTH_EVERY_MS);
showHealth();
const [http, sockets] = await Promise.all(["openapi", "asyncapi"].map(async (name) => (await fetch(`/v1/${name}.json`)).json()));
showOperations(http);
showChannels(sockets);
openLinked();
