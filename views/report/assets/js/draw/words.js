// Placement of texts: their width, and positions without overlap.

const textWidth = (() => {
  let context = null;
  return (text, size = 12, weight = 400) => {
    context ||= document.createElement("canvas").getContext("2d");
    context.font = `${weight} ${size}px ${getComputedStyle(document.documentElement).fontFamily}`;
    return context.measureText(text).width;
  };
})();

function shorten(text, room, size = 12, weight = 400) {
  if (textWidth(text, size, weight) <= room) return text;
  let kept = text;
  while (kept.length > 1 && textWidth(`${kept}…`, size, weight) > room) kept = kept.slice(0, -1);
  return `${kept}…`;
}

// The centre nearest to `middle` at which something of that width lies within 0 to `room`.
function inside(middle, width, room, margin = 0) {
  const least = width / 2 + margin;
  return Math.min(Math.max(middle, least), Math.max(room - least, least));
}

// A row for each text of [middle, width], so that none overlap in at most `most` rows; or null.
function inRows(texts, most, gap = 8) {
  const ends = [];
  const rows = texts.map(([middle, width]) => {
    const found = ends.findIndex((end) => middle - width / 2 >= end + gap);
    const row = found < 0 ? ends.length : found;
    ends[row] = middle + width / 2;
    return row;
  });
  return ends.length <= most ? rows : null;
}

// A text at a line across the frame: above or below it, at its right end or further left, where the fewest points are.
function lineNote(frame, kind, height, points, words) {
  const wide = textWidth(words);
  const near = points.filter((each) => Math.abs(each.y - height) < 24);
  let least = null;
  for (let x = frame.right; x - wide > frame.left; x -= wide / 2) {
    for (const y of [height - 5, height + 14]) {
      const covered = near.filter((each) => each.x > x - wide - 6 && each.x < x + 6 && Math.abs(each.y - y + 4) < 10).length;
      if (!least || covered < least.covered) least = { x, y, covered };
    }
  }
  if (least) frame.text(`note ${kind}`, least.x, least.y, words, { anchor: "end" });
}

// A text beside a point, kept inside the frame.
function note(frame, kind, x, y, words) {
  const right = x + 15 + textWidth(words) <= frame.right;
  frame.text(`note ${kind}`, right ? x + 11 : x - 11, Math.max(frame.top + 10, y + 4), words, { anchor: right ? "start" : "end" });
}
