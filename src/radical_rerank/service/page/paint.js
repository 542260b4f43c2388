// Used by the service's page and, inlined, by the report page.
const make = (parent, tag, text, cls) => {
  const node = parent.appendChild(document.createElement(tag));
  if (text !== undefined) node.textContent = text;
  if (cls) node.className = cls;
  return node;
};
// Draw the image pale and grey, then the patches of the tokens that are alive in colour.
function paint(canvas, image, blocks, alive, scale) {
  canvas.width = Math.round(image.naturalWidth * scale);
  canvas.height = Math.round(image.naturalHeight * scale);
  const ctx = canvas.getContext("2d");
  canvas.dataset.alive = alive ? alive.length : "all";
  if (!alive) { ctx.drawImage(image, 0, 0, canvas.width, canvas.height); return; }
  ctx.filter = "grayscale(1) contrast(0.35) brightness(1.45)";
  ctx.drawImage(image, 0, 0, canvas.width, canvas.height);
  ctx.filter = "none";
  let first = 0;
  for (const { box: [left, top, right, bottom], rows, columns } of blocks) {
    for (const token of alive) {
      const number = token - first;
      if (number < 0 || number >= rows * columns) continue;
      const w = (right - left) / columns, h = (bottom - top) / rows;
      const x = left + (number % columns) * w, y = top + Math.floor(number / columns) * h;
      ctx.drawImage(image, x * image.naturalWidth, y * image.naturalHeight, w * image.naturalWidth,
        h * image.naturalHeight, x * canvas.width, y * canvas.height, w * canvas.width, h * canvas.height);
    }
    first += rows * columns;
  }
}
