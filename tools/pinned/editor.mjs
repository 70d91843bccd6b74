// The editor of the book's pages: CodeMirror with what a cell of Python needs. Its colours are variables of live.css.
import { EditorView, keymap, drawSelection, highlightSpecialChars } from "@codemirror/view";
import { EditorState, Prec } from "@codemirror/state";
import { history, historyKeymap, defaultKeymap, indentWithTab } from "@codemirror/commands";
import { python } from "@codemirror/lang-python";
import { syntaxHighlighting, HighlightStyle, indentOnInput, bracketMatching, indentUnit } from "@codemirror/language";
import { tags } from "@lezer/highlight";

const coloured = (name, ...what) => ({ tag: what, color: `var(--live-${name})` });
const colours = HighlightStyle.define([
  coloured("keyword", tags.keyword, tags.operatorKeyword, tags.controlKeyword, tags.definitionKeyword, tags.moduleKeyword),
  coloured("string", tags.string, tags.special(tags.string)),
  coloured("comment", tags.comment),
  coloured("number", tags.number, tags.bool, tags.null),
  coloured("name", tags.function(tags.definition(tags.variableName)), tags.definition(tags.className)),
]);

/** Put an editor into `parent`. Shift+Enter calls onRun(true), Ctrl or Cmd+Enter onRun(false), Escape onLeave(), a change onChange(text). */
export function edit(parent, doc, { label, onRun, onLeave, onChange }) {
  const key = (name, act) => ({ key: name, run: () => (act(), true) });
  const extensions = [
    Prec.highest(keymap.of([key("Shift-Enter", () => onRun(true)), key("Mod-Enter", () => onRun(false)), key("Escape", onLeave)])),
    highlightSpecialChars(), history(), drawSelection(), indentOnInput(), bracketMatching(), python(), indentUnit.of("    "),
    syntaxHighlighting(colours), EditorView.lineWrapping, keymap.of([...defaultKeymap, ...historyKeymap, indentWithTab]),
    EditorView.contentAttributes.of({ "aria-label": label, spellcheck: "false", autocapitalize: "off", autocorrect: "off" }),
    EditorView.updateListener.of((update) => update.docChanged && onChange(update.state.doc.toString())),
  ];
  return new EditorView({ parent, state: EditorState.create({ doc, extensions }) });
}
