// Usage: node search.js SITE QUERY...: prints the page that the search of a built site lists first for each query.
const fs = require("fs");
const [site, ...queries] = process.argv.slice(2);
const workers = `${site}/assets/javascripts/workers/`;
const worker = fs.readdirSync(workers).find((name) => name.endsWith(".js"));
let receive, answer; // What the worker listens with, and what it has posted last.
Object.assign(globalThis, { self: globalThis, addEventListener: (_, listener) => (receive = listener) });
globalThis.postMessage = (message) => (answer = message);
eval(fs.readFileSync(workers + worker, "utf8"));

async function ask(type, data) {
  await receive({ data: { type, data } });
  while (!answer) await new Promise((resolve) => setTimeout(resolve, 1));
  const { data: result } = answer;
  answer = undefined;
  return result;
}

(async () => {
  await ask(0, { ...JSON.parse(fs.readFileSync(`${site}/search/search_index.json`)), options: {} });
  for (const query of queries) {
    const [first] = (await ask(2, query)).items;
    console.log(first ? first[0].location.split("#")[0] : "nothing");
  }
})();
