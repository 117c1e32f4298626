// A conversation is a tree of messages: an edited question or a second answer is a sibling of the first one.
// `chosen` says for each message (and for "", the root) which of its children is shown.

export function newConversation(settings) {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, title: "New conversation", changed: Date.now(), messages: {}, chosen: {},
    settings: { ...settings } };
}

export function add(conversation, parent, message) {
  const id = `m${Object.keys(conversation.messages).length + 1}`;
  const added = { id, parent: parent ?? "", text: "", ...message };
  conversation.messages[id] = added;
  conversation.chosen[added.parent] = id;
  conversation.changed = Date.now();
  return added;
}

// The messages that are shown, first one first.
export function path(conversation) {
  const shown = [];
  for (let id = conversation.chosen[""]; id; id = conversation.chosen[id]) shown.push(conversation.messages[id]);
  return shown;
}

export function siblings(conversation, message) {
  return Object.values(conversation.messages).filter((other) => other.parent === message.parent);
}

export function choose(conversation, message) {
  conversation.chosen[message.parent] = message.id;
}

export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 57)}…` : line || "Picture";
}
