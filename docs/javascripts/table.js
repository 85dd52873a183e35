// Shows the CSV named by `data-table` as a table that filters by text, and by the values of `data-choices`.

/** Rows of a CSV with quoted fields, as lists of texts. */
function parseCsv(text) {
  const rows = [[""]];
  let quoted = false;
  for (let i = 0; i < text.length; i++) {
    const row = rows[rows.length - 1];
    if (text[i] === '"') {
      if (quoted && text[i + 1] === '"') row[row.length - 1] += text[i++];
      else quoted = !quoted;
    } else if (text[i] === "," && !quoted) row.push("");
    else if (text[i] === "\n" && !quoted) rows.push([""]);
    else row[row.length - 1] += text[i];
  }
  return rows.filter((row) => row.length > 1);
}

/** The rows that hold each word of `words`, and the chosen value in each column of `choices`. */
function filterRows(rows, words, choices) {
  return rows.filter(
    (row) =>
      words.every((word) => row.join(" ").toLowerCase().includes(word)) &&
      Object.entries(choices).every(([column, value]) => !value || row[column] === value),
  );
}

async function showTable(place) {
  const names = place.dataset.columns.split(",");
  const [header, ...lines] = parseCsv(await (await fetch(place.dataset.table)).text());
  const rows = lines.map((line) => names.map((name) => line[header.indexOf(name)]));
  const search = Object.assign(document.createElement("input"), { type: "search", placeholder: place.dataset.example });
  const selects = place.dataset.choices.split(",").map((name) => {
    const values = [...new Set(rows.map((row) => row[names.indexOf(name)]))].filter(Boolean).sort();
    const select = document.createElement("select");
    select.append(new Option(`${name}: any`, ""), ...values.map((value) => new Option(`${name}: ${value}`, value)));
    return select;
  });
  const count = document.createElement("span");
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  names.forEach((name) => head.append(Object.assign(document.createElement("th"), { textContent: name })));
  const body = table.createTBody();
  const update = () => {
    const choices = {};
    place.dataset.choices.split(",").forEach((name, i) => (choices[names.indexOf(name)] = selects[i].value));
    const shown = filterRows(rows, search.value.toLowerCase().split(/\s+/).filter(Boolean), choices);
    count.textContent = ` ${shown.length} of ${rows.length}`;
    body.replaceChildren();
    shown.forEach((row) => {
      const line = body.insertRow();
      row.forEach((cell) => (line.insertCell().textContent = cell));
    });
  };
  [search, ...selects].forEach((input) => input.addEventListener("input", update));
  place.replaceChildren(search, ...selects, count, table);
  update();
}

if (typeof document !== "undefined") document.querySelectorAll("[data-table]").forEach(showTable);
else module.exports = { parseCsv, filterRows };
