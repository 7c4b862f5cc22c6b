/* Search on pages that were opened from a disk. Browsers start no worker from file://, so there the script runs in a
   hidden frame instead, which is all that the theme's search asks of a worker. Elsewhere this file does nothing. */
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const page = frame.contentDocument;
      page.open();
      page.write("<!doctype html><html><body></body></html>");
      page.close();
      const inside = frame.contentWindow;
      const load = (address) =>
        new Promise((resolve, reject) => {
          const script = page.createElement("script");
          script.src = address;
          script.onload = resolve;
          script.onerror = reject;
          page.body.appendChild(script);
        });
      inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => load(next)), Promise.resolve());
      inside.postMessage = (data) => {
        const said = new MessageEvent("message", { data });
        this.dispatchEvent(said);
        if (this.onmessage) this.onmessage(said);
      };
      this.tell = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      load(String(url)).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach(this.tell);
      });
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.tell(data);
    }
    terminate() {}
  };
}
