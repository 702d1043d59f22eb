// Makes a copy of a picture that no cache has seen: the same pixels, with a random comment in the file.

const PNG = [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a];
// The signature, and the chunk IHDR, which must come first.
const PNG_HEAD = 8 + 25;
const COMMENT_MARKER = 0xfe;

export function randomText() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function crc32(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit += 1) {
      crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
    }
  }
  return (crc ^ 0xffffffff) >>> 0;
}

function bigEndian(value) {
  return [value >>> 24, (value >>> 16) & 255, (value >>> 8) & 255, value & 255];
}

// A chunk `tEXt` (https://www.w3.org/TR/png-3/#11textinfo).
function pngComment(text) {
  const content = [...new TextEncoder().encode(`tEXtComment\0${text}`)];
  return new Uint8Array([...bigEndian(content.length - 4), ...content, ...bigEndian(crc32(content))]);
}

// The place behind the start of a JPEG file and its application segments, of which some must come first.
function behindJpegHead(bytes) {
  let at = 2;
  while (bytes[at] === 0xff && bytes[at + 1] >= 0xe0 && bytes[at + 1] <= 0xef) {
    at += 2 + (bytes[at + 2] << 8) + bytes[at + 3];
  }
  return at;
}

function jpegComment(text) {
  const content = new TextEncoder().encode(text);
  return new Uint8Array([0xff, COMMENT_MARKER, 0, content.length + 2, ...content]);
}

// Resolves to the copy; null for formats other than PNG and JPEG.
export async function uncachedCopy(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let at;
  let comment;
  if (PNG.every((byte, index) => bytes[index] === byte)) {
    [at, comment] = [PNG_HEAD, pngComment(randomText())];
  } else if (bytes[0] === 0xff && bytes[1] === 0xd8) {
    [at, comment] = [behindJpegHead(bytes), jpegComment(randomText())];
  } else {
    return null;
  }
  return new File([bytes.subarray(0, at), comment, bytes.subarray(at)], file.name, { type: file.type });
}
