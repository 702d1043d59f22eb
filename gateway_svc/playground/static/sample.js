// Draws a picture for people who have none at hand: one to three coloured shapes, as the demo model knows them.

const SIDE = 224;
const CELLS = 3;
const COLOURS = ["#d61e24", "#209636", "#2048d6", "#f4d618", "#f8860e", "#8028a0", "#f884bc", "#1a1a1a"];
const POLYGONS = {
  square: [[-0.8, -0.8], [0.8, -0.8], [0.8, 0.8], [-0.8, 0.8]],
  triangle: [[0, -1], [0.88, 0.72], [-0.88, 0.72]],
  diamond: [[0, -1], [0.68, 0], [0, 1], [-0.68, 0]],
  star: Array.from({ length: 10 }, (_, corner) => {
    const length = corner % 2 ? 0.42 : 1;
    const angle = ((36 * corner - 90) * Math.PI) / 180;
    return [length * Math.cos(angle), length * Math.sin(angle)];
  }),
};
const SHAPES = ["circle", ...Object.keys(POLYGONS)];

function shuffled(values) {
  const rest = [...values];
  const order = [];
  while (rest.length) {
    order.push(...rest.splice(Math.floor(Math.random() * rest.length), 1));
  }
  return order;
}

function draw(context, shape, x, y, radius) {
  context.beginPath();
  if (shape === "circle") {
    context.arc(x, y, radius, 0, 2 * Math.PI);
  } else {
    for (const [u, v] of POLYGONS[shape]) {
      context.lineTo(x + radius * u, y + radius * v);
    }
  }
  context.fill();
}

// Resolves to a PNG file.
export function sample() {
  const canvas = document.createElement("canvas");
  canvas.width = SIDE;
  canvas.height = SIDE;
  const context = canvas.getContext("2d");
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, SIDE, SIDE);
  const cell = SIDE / CELLS;
  const count = 1 + Math.floor(Math.random() * 3);
  const [cells, colours, shapes] = [shuffled(Array(CELLS * CELLS).keys()), shuffled(COLOURS), shuffled(SHAPES)];
  for (let index = 0; index < count; index += 1) {
    context.fillStyle = colours[index];
    const [column, row] = [cells[index] % CELLS, Math.floor(cells[index] / CELLS)];
    draw(context, shapes[index], (column + 0.5) * cell, (row + 0.5) * cell, 0.4 * cell);
  }
  return new Promise((resolve) => {
    canvas.toBlob((blob) => resolve(new File([blob], "shapes.png", { type: "image/png" })));
  });
}
