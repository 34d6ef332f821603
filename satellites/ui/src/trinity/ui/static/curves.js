// The curves of one or several runs, by uPlot: hover reads values, dragging zooms, a double click shows everything again.
"use strict";
(() => {
  const host = document.querySelector("#curves");
  if (!host) return;
  const LIVE_MS = 5000, MOST_CHARTS = 12, HEIGHT = 190;
  const COLOURS = ["--blue", "--orange", "--green", "--warn", "--bad", "--soft"];
  const charts = host.querySelector(".charts"), tools = host.querySelector(".tools");
  const tool = (name) => tools.querySelector(`[name=${name}]`);
  const runs = [...host.querySelectorAll("[data-run]")].map((one) => {
    const told = JSON.parse(one.textContent);
    return { url: one.dataset.run, title: one.dataset.title, names: told.names, series: told.series };
  });
  const opened = [...new Set(runs.flatMap((run) => Object.keys(run.series)))];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let shown = []; // {name, plot, whole}

  // Asks for the points of these metrics between two steps; from disk there is no service to ask.
  const ask = async (run, names, range = {}) => {
    if (location.protocol === "file:" || !names.length) return {};
    const query = new URLSearchParams([...names.map((name) => ["name", name]), ...Object.entries(range)]);
    const answer = await fetch(`${run.url}?${query}`).catch(() => null);
    if (!answer || !answer.ok) return {};
    const told = await answer.json();
    run.names = told.names;
    return told.series;
  };

  // Exponential moving average without the pull of its first value.
  const smooth = (values, weight) => {
    let sum = 0, total = 0;
    return values.map((value) => {
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  };

  const tables = (name) => runs.map((run) => {
    const [steps, seconds, values] = run.series[name] || [[], [], []];
    const x = tool("x").value === "time" ? seconds : steps;
    const order = x.map((_, place) => place).sort((a, b) => x[a] - x[b]);
    const positive = order.filter((place) => !tool("log").checked || values[place] > 0);
    const y = positive.map((place) => values[place]);
    return [positive.map((place) => x[place]), y, smooth(y, Number(tool("smooth").value))];
  });

  const clock = (seconds) => {
    const minutes = Math.floor(seconds / 60), two = (number) => String(number).padStart(2, "0");
    return minutes < 60 ? `${minutes}:${two(Math.round(seconds % 60))}` : `${Math.floor(minutes / 60)}:${two(minutes % 60)} h`;
  };
  const digits = (value) => (value == null ? "–" : Number(value.toPrecision(4)).toString());
  const axis = (more) => ({ stroke: colour("--soft"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") }, ...more });

  const options = (name) => {
    const smoothed = Number(tool("smooth").value) > 0, byTime = tool("x").value === "time";
    const series = runs.flatMap((run, place) => {
      const stroke = colour(COLOURS[place % COLOURS.length]);
      const line = { label: run.title, stroke, width: 1.6, spanGaps: true, value: (_, value) => digits(value), points: { size: 4 } };
      return smoothed ? [{ ...line, label: "", stroke: stroke + "55", width: 1 }, { ...line, points: { show: false } }] : [line];
    });
    return {
      width: Math.max(240, charts.querySelector("figure").clientWidth), height: HEIGHT,
      scales: { x: { time: false }, y: { distr: tool("log").checked ? 3 : 1 } },
      cursor: { sync: { key: "curves", setSeries: false }, drag: { x: true, y: false } },
      axes: [axis({ values: byTime ? (_, ticks) => ticks.map(clock) : (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick : "")) }),
        axis({ size: 58, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : digits(tick))) })],
      series: [{ label: tool("x").selectedOptions[0].text, value: (_, x) => (x == null ? "–" : byTime ? clock(x) : x) }, ...series],
      hooks: { setSelect: [(plot) => detail(name, plot)] },
    };
  };

  const data = (name) => {
    const smoothed = Number(tool("smooth").value) > 0;
    const joined = tables(name).flatMap(([x, raw, mean]) => (smoothed ? [[x, raw], [x, mean]] : [[x, raw]]));
    return uPlot.join(joined);
  };

  // The server keeps the least and the greatest value of each part of a long curve: a zoomed part gets all its steps.
  const detail = async (name, plot) => {
    if (!plot.select.width) return;
    const [from, to] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
    for (const run of runs.filter((one) => one.series[name])) {
      const curve = run.series[name], x = tool("x").value === "time" ? curve[1] : curve[0];
      const inside = curve[0].filter((_, place) => x[place] >= from && x[place] <= to);
      if (!inside.length) continue;
      const [first, last] = [Math.min(...inside), Math.max(...inside)];
      const more = (await ask(run, [name], { first, last }))[name];
      if (!more) continue;
      const outside = curve[0].map((step, place) => place).filter((place) => curve[0][place] < first || curve[0][place] > last);
      const merged = [...outside.map((place) => curve.map((column) => column[place])), ...more[0].map((_, place) => more.map((column) => column[place]))];
      merged.sort((a, b) => a[0] - b[0]);
      run.series[name] = [0, 1, 2].map((column) => merged.map((point) => point[column]));
    }
    plot.setData(data(name), false);
    plot.setScale("x", { min: from, max: to });
  };

  const draw = (names) => {
    shown.forEach((one) => one.plot.destroy());
    charts.replaceChildren(...names.map((name) => {
      const figure = document.createElement("figure"), caption = document.createElement("figcaption");
      figure.dataset.name = caption.textContent = name;
      figure.append(caption);
      return figure;
    }));
    shown = names.map((name, place) => ({ name, plot: new uPlot(options(name), data(name), charts.children[place]) }));
  };

  // All metrics that the box names, by a regular expression; without one those that the page opens with.
  const chosen = () => {
    const wanted = tool("metric").value.trim();
    if (!wanted) return opened;
    let matches = (name) => name.includes(wanted);
    try {
      const pattern = new RegExp(wanted, "i");
      matches = (name) => pattern.test(name);
    } catch { /* half an expression is a text */ }
    return [...new Set(runs.flatMap((run) => run.names))].filter(matches).slice(0, MOST_CHARTS);
  };
  const load = async (names, anew) => {
    await Promise.all(runs.map(async (run) => {
      const lacking = names.filter((name) => run.names.includes(name) && (anew || !run.series[name]));
      Object.assign(run.series, await ask(run, lacking));
    }));
    return names.filter((name) => runs.some((run) => run.series[name] && run.series[name][0].length));
  };
  let asked = 0;
  const show = async () => {
    const mine = ++asked, names = await load(chosen(), false);
    if (mine === asked) draw(names);
  };

  const list = tools.appendChild(document.createElement("datalist"));
  list.id = "metrics";
  list.append(...[...new Set(runs.flatMap((run) => run.names))].map((name) => new Option(name)));
  tools.hidden = false;
  tools.addEventListener("input", show);
  new ResizeObserver(() => shown.forEach((one, place) => {
    const width = Math.max(240, charts.children[place].clientWidth);
    if (width !== one.plot.width) one.plot.setSize({ width, height: HEIGHT });
  })).observe(charts);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  draw(opened.filter((name) => runs.some((run) => run.series[name] && run.series[name][0].length)));
  if (host.dataset.live !== undefined) {
    setInterval(async () => {
      const zoomed = (one) => one.plot.scales.x.min > one.plot.data[0][0] || one.plot.scales.x.max < one.plot.data[0].at(-1);
      if (document.hidden || shown.some(zoomed)) return;
      await load(shown.map((one) => one.name), true);
      shown.forEach((one) => one.plot.setData(data(one.name)));
    }, LIVE_MS);
  }
})();
