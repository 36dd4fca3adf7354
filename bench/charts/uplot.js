// The same by uPlot: every status a series of its own circles, a stepped line; it has no parallel coordinates.
const COLORS = { ok: "#0072b2", oom: "#d55e00", timeout: "#b0578d", crash: "#33383f", wrong: "#9a7d00", skipped: "#8a929c" };

let run = null;

function begin(document) {
  run = makeRun(document);
}

function hosted(options, data, host) {
  new uPlot({ width: host.clientWidth, height: 400, ...options }, data, host);
}

// Circles of one status, as its demonstration of scatter plots draws them.
function circles(color) {
  return (u, index) => {
    uPlot.orient(u, index, (series, xs, ys, sx, sy, toX, toY, left, top, width, height, moveTo, lineTo, rect, arc) => {
      const [x, y] = u.data[index];
      const path = new Path2D();
      for (let at = 0; at < x.length; at += 1) {
        const [cx, cy] = [toX(x[at], sx, width, left), toY(y[at], sy, height, top)];
        path.moveTo(cx + 3, cy);
        arc(path, cx, cy, 3, 0, 2 * Math.PI);
      }
      u.ctx.fillStyle = color;
      u.ctx.fill(path);
    });
    return null;
  };
}

const CHARTS = {
  progress: () => (host) => {
    const statuses = STATUSES.filter((each) => run.headline.counts[each]);
    let best = null;
    const line = run.rows.map((row) => { if (row.status === "ok" && !(row.throughput <= best)) best = row.throughput; return best; });
    hosted({
      scales: { x: { time: false } },
      series: [{}, ...statuses.map((each) => ({ label: each, stroke: COLORS[each], paths: () => null, points: { show: true, size: 6, fill: COLORS[each] } })),
        { label: "best", stroke: "#00805c", width: 2, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }],
    }, [run.rows.map((row) => row.trial), ...statuses.map((each) => run.rows.map((row) => (row.status !== each ? null : each === "ok" ? row.throughput : 0))), line], host);
  },
  memory: () => (host) => {
    const statuses = ["ok", "oom", "skipped"].filter((each) => run.headline.counts[each]);
    hosted({
      mode: 2, scales: { x: { time: false, range: (u, low, high) => [0, high] }, y: { range: (u, low, high) => [0, high] } },
      series: [null, ...statuses.map((each) => ({ label: each, facets: [{ scale: "x", auto: true }, { scale: "y", auto: true }], paths: circles(COLORS[each]) }))],
    }, [null, ...statuses.map((each) => {
      const rows = run.rows.filter((row) => row.status === each && given(memoryNeed(row)));
      return [rows.map(memoryNeed), rows.map((row) => row.throughput ?? 0)];
    })], host);
  },
};
