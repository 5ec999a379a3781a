// The server's page in a headless Chromium: text appears piece by piece and coloured, with its statistics.
// Then pages of two other origins, of which the server allows only the first, use the API with fetch().
import chromium from "@sparticuz/chromium"
import puppeteer from "puppeteer-core"

const [url, allowed, other] = process.argv.slice(2)

function tell(isRight, text) {
  console.log(`${isRight ? "ok  " : "MISS"}  ${text}`)
  if (!isRight) process.exitCode = 1
}

async function open(browser, address) {
  const page = await browser.newPage(), wrong = []
  page.on("pageerror", error => wrong.push(error.message))
  page.on("console", message => message.type() === "error" && wrong.push(message.text()))
  await page.goto(address)
  return { page, wrong }
}

async function ownPage(browser) {
  const { page, wrong } = await open(browser, url)
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
  tell(isRight, `the page: ${found.pieces} pieces in ${found.colours} colours; ${found.figures}; errors: ${wrong.length}`)
  if (wrong.length) console.log(wrong.join("\n"))
}

// Runs in the page. The headers are those of OpenAI's client for browsers, which cause a preflight request.
async function use(url) {
  const headers = { "Content-Type": "application/json", "Authorization": "Bearer none",
                    "X-Stainless-Lang": "js", "X-Stainless-Retry-Count": "0" }
  const answered = async response => { if (!response.ok) throw new Error(await response.text()); return response }
  const model = (await (await answered(await fetch(`${url}/v1/models`, { headers }))).json()).data[0].id
  const ask = async fields => answered(await fetch(`${url}/v1/chat/completions`, { method: "POST", headers,
    body: JSON.stringify({ model, messages: [{ role: "user", content: "import os" }], max_tokens: 48, seed: 7, ...fields }) }))
  const whole = (await (await ask({})).json()).choices[0].message.content
  const reader = (await ask({ stream: true })).body.pipeThrough(new TextDecoderStream()).getReader()
  let text = ""
  for (let part; !(part = await reader.read()).done;) text += part.value
  const events = text.split("\n").filter(line => line.startsWith("data: {")).map(line => JSON.parse(line.slice(6)))
  const pieces = events.flatMap(event => event.choices).map(choice => choice.delta.content ?? "").filter(Boolean)
  return { pieces: pieces.length, isSame: pieces.join("") === whole, isComplete: text.includes("data: [DONE]") }
}

async function otherPages(browser) {
  const { page, wrong } = await open(browser, allowed)
  const found = await page.evaluate(use, url)
  tell(found.isSame && found.isComplete && found.pieces > 1 && !wrong.length,
       `a page of an allowed origin: a chat, and its stream in ${found.pieces} pieces; errors: ${wrong.length}`)
  if (wrong.length) console.log(wrong.join("\n"))
  const refused = await (await open(browser, other)).page.evaluate(use, url).then(() => "", error => error.message)
  tell(/Failed to fetch/.test(refused), `a page of another origin: ${refused.split("\n")[0] || "was served"}`)
}

// This Chromium's own arguments turn off the rules for other origins.
const args = chromium.args.filter(argument => argument !== "--disable-web-security")
const browser = await puppeteer.launch({ args: [...args, "--no-sandbox"],
  executablePath: await chromium.executablePath(), headless: "shell" })
try {
  await ownPage(browser)
  await otherPages(browser)
} finally { await browser.close() }
