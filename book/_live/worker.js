// Python in a worker. The worker is made of a Blob that holds pyodide.asm.js, pyodide.js and this text, and fetches nothing, so
// that a page opened as a file can start it. Messages in: {start: {wasm, stdlib, lock, app, module}}, then one at a time
// {run: source}, {needed: sources, which}, {recall: JSON}. Out: {ready}, {event}, {done}, {failed}.
"use strict";
let python = null;

async function start({ wasm, stdlib, lock, app, module }) {
  module ??= await WebAssembly.compile(wasm);
  self.postMessage({ progress: "Python starts" });
  self.fetch = async (address) =>
    new Response(String(address).endsWith(".zip") ? stdlib : "", { headers: { "Content-Type": "application/wasm" } });
  WebAssembly.instantiateStreaming = async (_, imports) => ({ module, instance: await WebAssembly.instantiate(module, imports) });
  python = await loadPyodide({ indexURL: "https://pplab.invalid/", lockFileContents: lock, stdLibURL: "https://pplab.invalid/stdlib.zip" });
  self.postMessage({ progress: "pplab is imported" });
  python.unpackArchive(app, "zip", { extractDir: "/app" });
  python.runPython("import os, sys; sys.dont_write_bytecode = True; sys.path[:0] = ['/app/src', '/app/book/_live']; os.chdir('/app/notebooks')");
  python.kernel = python.pyimport("kernel");
  python.kernel.prepare();
  return { module };
}

const plain = (value) => (value?.toJs ? value.toJs({ dict_converter: Object.fromEntries }) : value);

function answer(message) {
  if ("needed" in message) return plain(python.kernel.needed(python.toPy(message.needed), message.which));
  if ("recall" in message) return python.kernel.recall(JSON.stringify(message.recall));
  return python.kernel.run(message.run, (...event) => self.postMessage({ event: event.map(plain) }));
}

self.onmessage = async ({ data }) => {
  try {
    if (data.start) self.postMessage({ ready: await start(data.start) });
    else self.postMessage({ done: answer(data), memory: python._module.HEAP8.length });
  } catch (error) { // Python itself has ended
    self.postMessage({ failed: String(error?.message || error).slice(-2000) });
  }
};
