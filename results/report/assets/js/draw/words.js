// Room for words: how wide they are, and where they stand without touching.

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

// The middle nearest to `middle` at which something of that width is inside 0 to `room`.
function inside(middle, width, room, margin = 0) {
  const least = width / 2 + margin;
  return Math.min(Math.max(middle, least), Math.max(room - least, least));
}

// In how many rows, at most `most`, texts of these [middle, width] stand without touching; a row for each, or null.
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

// Words beside a point, kept inside the frame.
function note(frame, kind, x, y, words) {
  const right = x + 15 + textWidth(words) <= frame.right;
  frame.text(`note ${kind}`, right ? x + 11 : x - 11, Math.max(frame.top + 10, y + 4), words, { anchor: right ? "start" : "end" });
}
