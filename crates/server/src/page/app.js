// The page: connects the chat, the panels and the key.

import * as api from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Panels } from "./panels.js";

const dialog = byId("key-dialog");
const field = byId("key");
let whenDecided = null;

/** Asks for a key. Whether there is another one now. */
function askForKey() {
  if (!whenDecided) {
    const had = api.key();
    byId("key-dialog-text").textContent = had
      ? "The server did not accept the key that you gave."
      : "Whoever runs the server can tell you the key.";
    byId("asked-key").value = "";
    let settle;
    whenDecided = new Promise((resolve) => (settle = resolve));
    whenDecided.settle = settle;
    dialog.returnValue = "";
    dialog.showModal();
    byId("asked-key").focus();
  }
  return whenDecided;
}

byId("key-form").addEventListener("submit", () => {
  api.setKey(byId("asked-key").value);
  field.value = api.key();
  dialog.returnValue = "use";
});
byId("key-cancel").addEventListener("click", () => dialog.close("not"));
dialog.addEventListener("close", () => {
  const { settle } = whenDecided ?? {};
  whenDecided = null;
  byId("asked-key").value = "";
  const given = dialog.returnValue === "use";
  if (given) panels.retry();
  settle?.(given);
});

const panels = new Panels({ askForKey });
const chat = new Chat({ askForKey, changed: () => panels.lookSoon() });

field.value = api.key();
field.addEventListener("change", () => {
  api.setKey(field.value);
  panels.retry();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !dialog.open && chat.stop()) {
    event.preventDefault();
    return;
  }
  if (!event.altKey || !event.shiftKey || event.ctrlKey || event.metaKey || dialog.open) return;
  const act = { KeyM: () => byId("message").focus(), KeyN: () => chat.clear(), KeyP: () => panels.toggle() }[event.code];
  if (act) {
    event.preventDefault();
    act();
  }
});

panels.start();
