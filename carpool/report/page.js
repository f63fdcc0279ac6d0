// Values under the pointer. Reads the data-hover attribute of each picture (charts.py) and writes text only, never markup.
"use strict";
(() => {
  const box = document.createElement("div");
  box.className = "tip";
  box.hidden = true;
  document.body.append(box);
  const make = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    return element;
  };
  const nearest = (list, x) => {
    let best = 0;
    for (let i = 1; i < list.length; i++) if (Math.abs(list[i] - x) < Math.abs(list[best] - x)) best = i;
    return best;
  };
  const put = (rows, event) => {
    box.replaceChildren(...rows.map(([text, role]) => {
      const row = document.createElement("div");
      if (role) {
        const dot = document.createElement("i");
        dot.style.background = `var(--${role})`;
        row.append(dot);
      }
      row.append(text);
      return row;
    }));
    box.hidden = false;
    const wide = box.offsetWidth, high = box.offsetHeight, room = document.documentElement.clientWidth;
    box.style.left = `${Math.max(4, Math.min(event.clientX + 14, room - wide - 4))}px`;
    box.style.top = `${event.clientY > high + 20 ? event.clientY - high - 12 : event.clientY + 18}px`;
  };
  for (const svg of document.querySelectorAll("svg[data-hover]")) {
    const data = JSON.parse(svg.dataset.hover);
    const over = make("g", { class: "over" });
    svg.append(over);
    const hide = () => { box.hidden = true; over.replaceChildren(); };
    const move = (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const rows = data.lines ? lines(data, at.x) : cells(data, at.x, at.y);
      over.replaceChildren(...(rows ? rows.marks : []));
      if (rows) put(rows.texts, event); else hide();
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", hide);
  }
  for (const svg of document.querySelectorAll("svg.lanes")) {
    const show = (event) => {
      const told = event.target.dataset.tip;
      if (told) put([[told]], event); else box.hidden = true;
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", () => { box.hidden = true; });
  }
  function lines(data, x) {
    const main = data.lines.find((line) => !line.point && line.x.length > 2) || data.lines[0];
    const own = nearest(main.x, x), marks = [], texts = [[`${data.across} ${main.at[own]}`]];
    marks.push(make("line", { class: "guide", x1: main.x[own], x2: main.x[own], y1: data.top, y2: data.floor }));
    for (const line of data.lines) {
      const i = nearest(line.x, main.x[own]);
      if (line.x.length === 2 ? false : Math.abs(line.x[i] - main.x[own]) > (line.point ? 6 : 3)) continue;
      const dot = make("circle", { cx: line.x[i], cy: line.y[i], r: 3.5 });
      dot.style.fill = `var(--${line.role})`;
      marks.push(dot);
      texts.push([`${line.name ? line.name + " " : ""}${line.text[i]}`, line.role]);
    }
    return { marks, texts };
  }
  function cells(data, x, y) {
    const column = data.x.findLastIndex((left) => left <= x), row = Math.floor((y - data.y) / data.h);
    if (column < 0 || x > data.x[column] + data.w || row < 0 || row >= data.rows.length) return null;
    const text = data.text[row * data.x.length + column];
    if (text === null) return null;
    const mark = make("rect", { class: "guide", x: data.x[column], y: data.y + row * data.h, width: data.w, height: data.h });
    return { marks: [mark], texts: [[`${data.rows[row]}, ${data.columns[column]}`], [text + data.suffix]] };
  }
})();
