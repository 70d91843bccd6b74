// node library.mjs PYODIDE OUT: compile and cut Python's library with Pyodide's own Python, by library.py.
import { loadPyodide } from "pyodide";
import fs from "fs";
const [folder, out] = process.argv.slice(2);
const python = await loadPyodide({ indexURL: folder });
python.FS.writeFile("/python_stdlib.zip", fs.readFileSync(`${folder}/python_stdlib.zip`));
python.runPython(fs.readFileSync(new URL("library.py", import.meta.url), "utf8"));
fs.writeFileSync(out, python.FS.readFile("/stdlib.zip"));
