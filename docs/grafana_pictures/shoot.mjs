// Draws dashboards in a headless Chromium and writes a PNG of each. Run where node_modules lie; the job comes on stdin:
// {chromium, dashboards: {PNG: JSON file}, source: {url, daemon, from, to, interval}, width, note}. Prints a line for each panel that lacks something.

import { createServer } from "node:http";
import { createRequire } from "node:module";
import { readFile } from "node:fs/promises";
import { dirname, extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";

const modules = join(process.cwd(), "node_modules");
const require = createRequire(join(process.cwd(), "package.json"));
const esbuild = require("esbuild");
const puppeteer = require("puppeteer-core");

const PAGE = `<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><link rel="stylesheet" href="/dashboard.css">
<style>body { margin: 0 } #root { width: fit-content }</style><div id="root"></div><script src="/dashboard.js"></script>`;
const SETTLED_MS = 1500;

const job = JSON.parse(await readFile("/dev/stdin", "utf8"));

await esbuild.build({
  entryPoints: [join(dirname(fileURLToPath(import.meta.url)), "dashboard.jsx")],
  outdir: "page",
  bundle: true,
  minify: true,
  nodePaths: [modules],
  define: { "process.env.NODE_ENV": '"production"', global: "window" },
  loader: { ".svg": "dataurl", ".woff": "dataurl", ".woff2": "dataurl", ".ttf": "dataurl" },
  logLevel: "error",
});

const TYPES = { ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".woff2": "font/woff2" };
const WEIGHTS = { Regular: 400, Medium: 500 };

// Where the library's icons and fonts lie, which Grafana serves at the same paths.
function fileOf(path) {
  const icon = path.indexOf("/img/icons/");
  if (icon >= 0) return join(modules, "@grafana/ui/dist/public", path.slice(icon));
  const [, weight] = /\/Inter-(\w+)\.woff2$/.exec(path) ?? [];
  if (weight) return join(modules, `@fontsource/inter/files/inter-latin-${WEIGHTS[weight]}-normal.woff2`);
  return join("page", path);
}

async function answer(request) {
  const { pathname, search } = new URL(request.url, "http://here");
  if (pathname === "/") return ["text/html", PAGE];
  if (pathname.startsWith("/jaeger/")) {
    const found = await fetch(job.source.daemon + pathname.slice("/jaeger".length) + search);
    return ["application/json", await found.text()];
  }
  const file = fileOf(normalize(pathname));
  return [TYPES[extname(file)], await readFile(file)];
}

const server = createServer(async (request, response) => {
  try {
    const [type, content] = await answer(request);
    response.setHeader("content-type", type).end(content);
  } catch {
    response.writeHead(404).end();
  }
});
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));

const browser = await puppeteer.launch({
  executablePath: job.chromium,
  args: ["--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--font-render-hinting=none"],
});
try {
  for (const [picture, file] of Object.entries(job.dashboards)) {
    const page = await browser.newPage();
    page.on("pageerror", (error) => console.log(`${file}: ${error}`));
    page.on("console", (message) => message.type() === "error" && console.log(`${file}: ${message.text()}`));
    await page.setViewport({ width: job.width, height: 1000 });
    await page.goto(`http://127.0.0.1:${server.address().port}/`);
    const dashboard = JSON.parse(await readFile(file, "utf8"));
    const drawn = await page.evaluate((...all) => window.draw(...all), dashboard, job.source, job.width, job.note);
    for (const problem of drawn.problems) console.log(`${dashboard.title}: ${problem}`);
    await page.setViewport({ width: job.width, height: drawn.height }); // what is out of sight is not drawn
    await page.waitForFunction(() => [...document.querySelectorAll("svg")].every((icon) => icon.childElementCount));
    await page.evaluate(() => document.fonts.ready);
    await new Promise((settled) => setTimeout(settled, SETTLED_MS));
    await page.screenshot({ path: picture });
    await page.close();
  }
} finally {
  await browser.close();
  server.close();
}
