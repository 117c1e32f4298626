// The conversations, in the browser's IndexedDB: pictures make them too large for localStorage.

const NAME = "conversations";
let opened;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const opening = indexedDB.open("outrider", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(NAME, { keyPath: "id" });
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
  return opened;
}

async function run(mode, action) {
  const store = (await database()).transaction(NAME, mode).objectStore(NAME);
  return new Promise((resolve, reject) => {
    const asked = action(store);
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

export async function loadAll() {
  const all = await run("readonly", (store) => store.getAll());
  return all.sort((a, b) => b.changed - a.changed);
}

export const save = (conversation) => run("readwrite", (store) => store.put(structuredClone(conversation)));
export const remove = (id) => run("readwrite", (store) => store.delete(id));
