// Makes elements. Children are elements or texts, and a text stays a text: nothing here reads HTML.

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && !name.startsWith("aria")) {
      element[name] = value;
    } else {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

// Says something to screen readers without moving the focus.
export function announce(text) {
  byId("announcements").textContent = text;
}

// Shows a message beside the control that it is about; an empty one hides it.
export function notify(place, text) {
  place.textContent = text;
  place.hidden = text === "";
}

// Shows one of two buttons in the place of the other. The focus moves along, so that it is not lost.
export function swap(shown, hidden) {
  const hadFocus = document.activeElement === hidden;
  shown.hidden = false;
  hidden.hidden = true;
  if (hadFocus) {
    shown.focus();
  }
}

export function milliseconds(seconds) {
  const value = seconds * 1000;
  if (value >= 10_000) {
    return `${(value / 1000).toFixed(1)} s`;
  }
  return value >= 1 || value === 0 ? `${Math.round(value)} ms` : "under 1 ms";
}

export function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(1)} MB`;
}
