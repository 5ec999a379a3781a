// The server's page in a headless Chromium: text appears piece by piece and coloured, with its statistics.
import chromium from "@sparticuz/chromium"
import puppeteer from "puppeteer-core"

const [url] = process.argv.slice(2)
const browser = await puppeteer.launch({ args: [...chromium.args, "--no-sandbox"],
  executablePath: await chromium.executablePath(), headless: "shell" })
try {
  const page = await browser.newPage(), wrong = []
  page.on("pageerror", error => wrong.push(error.message))
  page.on("console", message => message.type() === "error" && wrong.push(message.text()))
  await page.goto(url)
  await page.evaluate(() => { document.getElementById("seed").value = "7" })
  await page.click("#go")
  await page.waitForFunction(() => document.querySelectorAll("#text span").length > 0)
  const early = await page.$$eval("#text span", spans => spans.length)
  await page.waitForFunction(() => document.getElementById("go").textContent === "Generate")
  const found = await page.evaluate(() => ({
    pieces: document.querySelectorAll("#text span").length,
    colours: new Set([...document.querySelectorAll("#text span")].map(span => getComputedStyle(span).color)).size,
    text: document.getElementById("text").textContent,
    figures: document.getElementById("figures").textContent,
  }))
  const body = { model: (await (await fetch(`${url}/v1/models`)).json()).data[0].id, prompt: "import os\n",
                 max_tokens: 128, temperature: 0.8, seed: 7 }
  const headers = { "Content-Type": "application/json" }
  const answer = await (await fetch(`${url}/v1/completions`, { method: "POST", headers, body: JSON.stringify(body) })).json()
  const isRight = found.text === answer.choices[0].text && found.colours > 1 && early < found.pieces &&
    /acceptance 0\.\d\d/.test(found.figures) && !wrong.length
  console.log(`${isRight ? "ok  " : "MISS"}  the page: ${found.pieces} pieces in ${found.colours} colours; ` +
              `${found.figures}; errors: ${wrong.length}`)
  if (wrong.length) console.log(wrong.join("\n"))
  process.exitCode = isRight ? 0 : 1
} finally { await browser.close() }
