// Runs the pure functions of figures/live/states.js on cases from stdin, and writes what Python compares.
import { readFileSync } from "node:fs";
import { runInThisContext } from "node:vm";

runInThisContext(readFileSync(process.argv[2], "utf8"));
const run = (code) => runInThisContext(`(${code})`);
const [steps, say, values, traffic] = ["steps", "say", "values", "traffic"].map(run);
const only = (x, names) => Object.fromEntries(names.map((n) => [n, x[n]]));

/** Whether a sentence has an equation e^(a − b) = α that does not hold in the digits that it prints. */
function wrongPower(words) {
  const [, a, b, alpha] = words.replaceAll("−", "-").match(/e\^\((-?[\d.]+)\s-\s\(?(-?[\d.]+)\)*\s=\s(\d\.\d+)/) || [];
  return alpha !== undefined && Math.exp(a - b).toFixed(alpha.split(".")[1].length) !== alpha;
}

/** Sentences and numbers beside the code that a reader must never see. */
function badWords(step, sizes) {
  const rows = step.rows ? Array.from({ length: step.rows[1] - step.rows[0] }, (_, a) => step.rows[0] + a) : [0];
  const words = rows.flatMap((r) => [say(step, r, sizes), ...values(step, r)]);
  return words.filter((x) => typeof x !== "string" || /NaN|undefined|Infinity/.test(x) || wrongPower(x));
}

const asked = {
  algorithm1({ q, k, v, order, ...options }) {
    const all = steps(q, k, v, { order, ...options });
    const sizes = { N_q: q.length, N_k: k.length, B_r: options.B_r, B_c: options.B_c };
    const kept = all.filter((x) => ["shrink", "add", "store"].includes(x.op));
    const fields = ["op", "i", "j", "s", "p", "alpha", "m", "l", "o", "held", "moved", "factor", "was"];
    const done = only(all.at(-1), ["O", "L", "hbm_l", "hbm_m", "loads", "stores", "difference", "moved"]);
    return {
      tiles: kept.map((x) => only(x, fields)),
      done,
      moved: all.map((x) => x.moved),
      closed: traffic(order, { ...sizes, causal: options.causal }, v[0].length),
      bad: all.flatMap((x) => badWords(x, sizes)),
    };
  },
  online: ({ scores, values, order, B }) => run("online")(scores, values, run("keyBlocks")(order, scores.length, B)),
  plan: ({ chip, settings, compiled }) => run("plan")(chip, settings, compiled),
  refused({ chip, settings }) {
    try {
      run("plan")(chip, settings);
      return "";
    } catch (e) {
      return e.message;
    }
  },
  timetable: ({ heads, tiling, SMs, perSM, ...options }) =>
    run("timetable")(run("programs")(heads, tiling, options), SMs, perSM),
  beside: ({ q, k, v, ...options }) => {
    const [one, two] = ["fa1", "fa2"].map((order) => steps(q, k, v, { order, ...options }));
    return { pairs: run("together")(one, two), ops: [one, two].map((all) => all.map(({ op }) => op)) };
  },
  numbersOf: (words) => run("numbersOf")(words),
  race: ({ tiling, seed }) => run("race")(tiling, seed),
  backward: ({ tiling, passes }) => run("backward")(tiling, passes),
};

const special = (_, x) => (x === "-inf" ? -Infinity : x);
const answers = JSON.parse(readFileSync(0, "utf8"), special).map(([what, given]) => asked[what](given));
const plain = (_, x) => (x === -Infinity ? "-inf" : Number.isNaN(x) ? "nan" : x);
process.stdout.write(JSON.stringify(answers, plain));
