"use strict";
function drawReport() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const palettes = {
    light: ["#2456c8", "#c2571a", "#0b8a5f", "#b8348b", "#7a5cd6", "#0b8199", "#927300", "#d0383f"],
    dark: ["#7da7ff", "#f29a5c", "#4fcf9f", "#f07cc6", "#b59cff", "#4fc6dd", "#dcc04a", "#ff8d8a"],
  };
  const comparators = {
    light: ["#16191f", "#7c8494", "#5b4bb7", "#a24fb5", "#d06a8c", "#c98a2b"],
    dark: ["#eef1f6", "#8d96a5", "#9d90f5", "#d28be3", "#f397b4", "#ecc06a"],
  };
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const chosen = { view: 0, variant: {} };

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const narrow = () => window.innerWidth < 560;

  function look(role) {
    const theme = dark.matches ? "dark" : "light";
    const colors = (role.startsWith("comparator") ? comparators : palettes)[theme];
    if (role === "none") return { color: dark.matches ? "#6d7684" : "#a3abb8", dash: "solid" };
    if (role === "played") return { color: style("--ink"), dash: "solid" };
    const index = Number(role.split("-")[1]);
    const dash = dashes[Math.floor(index / colors.length) % dashes.length];
    return { color: colors[index % colors.length], dash };
  }

  function trace(spec, variant, id) {
    const isList = Array.isArray(spec.color);
    const { color, dash } = isList
      ? { color: spec.color.map((role) => look(role).color) } : look(spec.color);
    const common = { name: spec.name, x: spec.x || variant.x, y: spec.y, type: "scatter" };
    const hover = `%{y:.4~g}<extra>${spec.name}</extra>`;
    if (spec.kind === "area") {
      return { ...common, mode: "lines", stackgroup: id, line: { width: 0, color, shape: "hvh" },
        fillcolor: color, hovertemplate: `%{y:.1%}<extra>${spec.name}</extra>` };
    }
    if (spec.kind === "marks") {
      return { ...common, mode: "markers", text: spec.text, hovertemplate: "%{text}<extra></extra>",
        marker: { symbol: "triangle-up", size: 11, color, line: { width: 1.5, color: style("--card") } } };
    }
    if (spec.kind === "dots") {
      return { ...common, mode: "lines+markers", text: spec.text, line: { width: 2, color },
        marker: { size: 6, color }, showlegend: false,
        hovertemplate: "%{x} switches allowed: %{y:.4~g}<br>%{text}<extra></extra>" };
    }
    if (spec.kind === "bars") {
      const whiskers = { type: "data", symmetric: false, color: style("--ink"), thickness: 1.5,
        array: spec.y.map((y, at) => (spec.high[at] === null ? 0 : spec.high[at] - y)),
        arrayminus: spec.y.map((y, at) => (spec.low[at] === null ? 0 : y - spec.low[at])) };
      return { name: spec.name, type: "bar", orientation: "h", x: spec.y, y: spec.text, error_x: whiskers,
        marker: { color }, showlegend: false, hovertemplate: "%{y}: %{x:.4~g}<extra></extra>" };
    }
    const width = spec.color === "played" ? 3 : 2;
    const bounds = spec.low ? { error_y: { type: "data", symmetric: false, thickness: 1, width: 3,
      array: spec.y.map((y, at) => spec.high[at] - y),
      arrayminus: spec.y.map((y, at) => y - spec.low[at]) } } : {};
    return { ...common, ...bounds, mode: "lines", connectgaps: false, line: { width, color, dash },
      hovertemplate: hover };
  }

  function layout(plot, variant) {
    const axis = {
      gridcolor: style("--line"), linecolor: style("--line"), zerolinecolor: style("--soft"),
      zerolinewidth: 1, automargin: true, tickfont: { size: 12 },
      title: { font: { size: 12.5 }, standoff: 10 },
    };
    const y = { ...axis, title: { ...axis.title, text: variant.y_title } };
    const isShare = variant.traces.length > 0 && variant.traces[0].kind === "area";
    if (isShare) Object.assign(y, { range: [0, 1], tickformat: ".0%" });
    const isBars = variant.traces.length > 0 && variant.traces[0].kind === "bars";
    if (isBars) Object.assign(y, { type: "category", autorange: "reversed", title: { text: "" } });
    const byToken = !["dynamic", "policies", "calibration"].includes(plot.id);
    const along = isBars ? { x0: variant.level, x1: variant.level, yref: "paper", y0: 0, y1: 1 }
      : { xref: "paper", x0: 0, x1: 1, y0: variant.level, y1: variant.level };
    const shapes = variant.level === null ? []
      : [{ type: "line", ...along, line: { width: 1.5, dash: "dot", color: style("--ink") } }];
    return {
      margin: { l: 8, r: 8, t: 30, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", hovermode: byToken ? "x unified" : "closest",
      hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"),
        font: { color: style("--ink"), size: 12 } },
      font: { family: getComputedStyle(document.body).fontFamily, color: style("--soft"), size: 12.5 },
      legend: { orientation: "h", x: 0, xanchor: "left", y: -0.22, yanchor: "top",
        font: { color: style("--ink") } },
      xaxis: { ...axis, title: { ...axis.title, text: variant.x_title }, zeroline: false,
        nticks: narrow() ? 5 : 10, ...(byToken ? { hoverformat: ",.0f" } : {}) },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--soft"), activecolor: style("--accent") },
      shapes, yaxis: y, dragmode: narrow() ? false : "zoom",
    };
  }

  function draw(plot) {
    const host = document.querySelector(`[data-plot="${plot.id}"] .plot`);
    if (!host) return;
    const index = Math.min(chosen.variant[plot.id] || 0, plot.variants.length - 1);
    const variant = plot.variants[index];
    const isBars = variant.traces[0].kind === "bars";
    host.style.height = isBars ? `${110 + 34 * variant.traces[0].y.length}px` : "";
    Plotly.react(host, variant.traces.map((spec) => trace(spec, variant, plot.id)),
      layout(plot, variant), { responsive: true, displaylogo: false, displayModeBar: narrow() ? false : "hover",
        modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
  }

  function element(tag, attributes, text) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function variantSwitch(plot) {
    const box = element("div", { class: "switch", role: "group", "aria-label": "Show" });
    plot.variants.forEach((variant, index) => {
      const pressed = index === (chosen.variant[plot.id] || 0);
      const button = element("button", { type: "button", "aria-pressed": pressed }, variant.label);
      button.addEventListener("click", () => {
        chosen.variant[plot.id] = index;
        box.querySelectorAll("button").forEach((one, at) =>
          one.setAttribute("aria-pressed", at === index));
        draw(plot);
      });
      box.append(button);
    });
    return box;
  }

  function card(plot) {
    const box = element("article", { class: "card", "data-plot": plot.id });
    const bar = element("div", { class: "bar" });
    bar.append(element("h3", {}, plot.title));
    if (plot.variants.length > 1) bar.append(variantSwitch(plot));
    box.append(bar, element("p", { class: "note" }, plot.note));
    box.append(plot.empty
      ? element("p", { class: "empty" }, `Nothing to draw: ${plot.empty}.`)
      : element("div", { class: "plot" }));
    return box;
  }

  function show() {
    const plots = data.views[chosen.view].plots;
    const root = document.getElementById("plots");
    root.querySelectorAll(".plot").forEach((host) => Plotly.purge(host));
    root.replaceChildren(...plots.map(card));
    plots.forEach((plot) => plot.variants.length && draw(plot));
  }

  const picker = document.getElementById("view");
  data.views.forEach((view, index) => picker.append(element("option", { value: index }, view.label)));
  picker.parentElement.hidden = data.views.length < 2;
  picker.addEventListener("change", () => { chosen.view = Number(picker.value); show(); });
  const redraw = () => data.views[chosen.view].plots.forEach((plot) => plot.variants.length && draw(plot));
  dark.addEventListener("change", redraw);
  show();
  document.documentElement.dataset.drawn = "true";
}

async function loadPlotly() {
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
}

loadPlotly().then(drawReport).catch((error) => {
  document.getElementById("plots").textContent =
    `The plots could not be drawn (${error.message}); a browser of 2023 or newer can.`;
  throw error;
});
