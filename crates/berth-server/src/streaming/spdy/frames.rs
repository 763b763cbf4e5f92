//! SPDY/3.1 frame codec: bytes to events and back (spec 04b §3). Pure.
//!
//! The decoder passes the payload of a data frame on in chunks as they arrive, so that a frame of 16 MiB needs no
//! buffer of that size; it reads control frames, which are small, as a whole. There is no flow control: the protocol's
//! WINDOW_UPDATE frames are parsed and ignored, as other implementations do.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::headers::{Headers, Packer, Unpacker};

/// Maximum payload of a control frame, in bytes.
const CONTROL: usize = 64 << 10;
/// Maximum data bytes per frame and per event.
pub const CHUNK: usize = 32 << 10;
const VERSION: u16 = 3;
const FIN: u8 = 1;
const HEAD: usize = 8;

/// 31-bit SPDY stream ID; odd if the client opened the stream, never 0.
pub type StreamId = u32;

/// Protocol error of the peer; it ends the connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpdyError {
    /// Version other than 3.
    #[error("unsupported SPDY version {0}")]
    Version(u16),
    /// Control frame longer than 64 KiB.
    #[error("SPDY control frame too large: {0} bytes")]
    TooLarge(usize),
    /// Control frame of invalid length.
    #[error("malformed SPDY frame of type {0}")]
    Malformed(u16),
    /// Invalid header block.
    #[error("invalid SPDY headers: {0}")]
    Headers(&'static str),
    /// Stream ID 0.
    #[error("invalid SPDY stream ID 0")]
    StreamZero,
}

/// Status code of a RST_STREAM frame; the discriminant is the value on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetStatus {
    /// The peer violated the protocol.
    ProtocolError = 1,
    /// The stream is refused before any processing.
    RefusedStream = 3,
    /// The stream is no longer needed.
    Cancel = 5,
}

/// Event decoded from the peer's frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpdyEvent {
    /// The peer opens a stream.
    SynStream {
        /// Stream ID.
        stream: StreamId,
        /// Whether the peer half-closes the stream: it sends no data on it.
        fin: bool,
        /// Request headers of the stream.
        headers: Headers,
    },
    /// The peer accepts a stream that we opened.
    SynReply {
        /// Stream ID.
        stream: StreamId,
        /// Whether the peer half-closes the stream: it sends no data on it.
        fin: bool,
    },
    /// The peer resets a stream.
    Reset {
        /// Stream ID.
        stream: StreamId,
        /// Status code on the wire; see [`ResetStatus`].
        status: u32,
    },
    /// Additional headers; their content is discarded.
    Headers {
        /// Stream ID.
        stream: StreamId,
        /// Whether the peer half-closes the stream.
        fin: bool,
    },
    /// Ping, or the reply to one, with its ID.
    Ping(u32),
    /// The peer accepts no more streams.
    GoAway,
    /// Chunk of a data frame.
    Data {
        /// Stream ID.
        stream: StreamId,
        /// Payload; may be empty where `fin` is set.
        bytes: Bytes,
        /// Whether the peer half-closes the stream.
        fin: bool,
    },
    /// Frame of a type that is ignored.
    Ignored,
}

struct Payload {
    stream: StreamId,
    left: usize,
    fin: bool,
}

/// Incremental frame decoder for one direction of a connection.
pub struct Decoder {
    unpacker: Unpacker,
    data: Option<Payload>,
}

impl Default for Decoder {
    fn default() -> Self {
        Self { unpacker: Unpacker::new(), data: None }
    }
}

impl Decoder {
    /// Removes the next event from the front of `input`; returns `None` where more bytes are needed.
    ///
    /// # Errors
    /// On a protocol error; the decoder is unusable afterwards.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<SpdyEvent>, SpdyError> {
        if let Some(payload) = self.data.take() {
            return Ok(self.piece(payload, input));
        }
        let mut head: &[u8] = match input.get(..HEAD) {
            Some(head) => head,
            None => return Ok(None),
        };
        let (first, second) = (head.get_u32(), head.get_u32());
        let (flags, length) = (second.to_be_bytes()[0], (second & 0x00ff_ffff) as usize);
        if first & 0x8000_0000 == 0 {
            if first == 0 {
                return Err(SpdyError::StreamZero);
            }
            input.advance(HEAD);
            return Ok(self.piece(Payload { stream: first, left: length, fin: flags & FIN != 0 }, input));
        }
        let [high, low, kind_high, kind_low] = first.to_be_bytes();
        let version = u16::from_be_bytes([high & 0x7f, low]);
        if version != VERSION {
            return Err(SpdyError::Version(version));
        }
        if length > CONTROL {
            return Err(SpdyError::TooLarge(length));
        }
        if input.len() < HEAD + length {
            return Ok(None);
        }
        input.advance(HEAD);
        let payload = input.split_to(length);
        self.control(u16::from_be_bytes([kind_high, kind_low]), flags & FIN != 0, &payload).map(Some)
    }

    /// Returns the available part of a data frame, at most [`CHUNK`] bytes.
    fn piece(&mut self, mut payload: Payload, input: &mut BytesMut) -> Option<SpdyEvent> {
        let size = payload.left.min(input.len()).min(CHUNK);
        if size == 0 && payload.left > 0 {
            self.data = Some(payload);
            return None;
        }
        payload.left -= size;
        let (stream, bytes) = (payload.stream, input.split_to(size).freeze());
        let fin = payload.fin && payload.left == 0;
        if payload.left > 0 {
            self.data = Some(payload);
        }
        Some(SpdyEvent::Data { stream, bytes, fin })
    }

    fn control(&mut self, kind: u16, fin: bool, mut payload: &[u8]) -> Result<SpdyEvent, SpdyError> {
        let malformed = SpdyError::Malformed(kind);
        let mut number = || payload.try_get_u32().map_err(|_| malformed.clone());
        let stream = |number: u32| match number & 0x7fff_ffff {
            0 => Err(SpdyError::StreamZero),
            stream => Ok(stream),
        };
        match kind {
            1 => {
                let stream = stream(number()?)?;
                let _associated = number()?;
                let packed = payload.get(2..).ok_or(malformed)?; // skips priority and slot
                Ok(SpdyEvent::SynStream { stream, fin, headers: self.unpacker.unpack(packed)? })
            }
            2 | 8 => {
                let stream = stream(number()?)?;
                self.unpacker.unpack(payload)?;
                Ok(if kind == 2 { SpdyEvent::SynReply { stream, fin } } else { SpdyEvent::Headers { stream, fin } })
            }
            3 => Ok(SpdyEvent::Reset { stream: stream(number()?)?, status: number()? }),
            6 => Ok(SpdyEvent::Ping(number()?)),
            7 => Ok(SpdyEvent::GoAway),
            _ => Ok(SpdyEvent::Ignored),
        }
    }
}

/// Frame encoder for SYN_STREAM and SYN_REPLY, with the shared header compression state.
pub struct Encoder(Packer);

impl Default for Encoder {
    fn default() -> Self {
        Self(Packer::new())
    }
}

impl Encoder {
    /// Appends a SYN_STREAM frame, which opens a stream.
    ///
    /// # Errors
    /// If the headers cannot be compressed.
    pub fn syn_stream(&mut self, stream: StreamId, headers: &Headers, out: &mut BytesMut) -> Result<(), SpdyError> {
        let mut payload = BytesMut::new();
        payload.put_u32(stream);
        payload.put_u32(0);
        payload.put_u16(0);
        self.0.pack(headers, &mut payload)?;
        control(1, &payload, out);
        Ok(())
    }

    /// Appends a SYN_REPLY frame, which accepts a stream.
    ///
    /// # Errors
    /// If the headers cannot be compressed.
    pub fn syn_reply(&mut self, stream: StreamId, out: &mut BytesMut) -> Result<(), SpdyError> {
        let mut payload = BytesMut::new();
        payload.put_u32(stream);
        self.0.pack(&Headers::default(), &mut payload)?;
        control(2, &payload, out);
        Ok(())
    }
}

fn control(kind: u16, payload: &[u8], out: &mut BytesMut) {
    out.put_u16(0x8000 | VERSION);
    out.put_u16(kind);
    out.put_u32(u32::try_from(payload.len()).unwrap_or(0) & 0x00ff_ffff); // our control frames are short
    out.put_slice(payload);
}

/// Appends a RST_STREAM frame.
pub fn reset(stream: StreamId, status: ResetStatus, out: &mut BytesMut) {
    let numbers = [stream.to_be_bytes(), (status as u32).to_be_bytes()];
    control(3, numbers.as_flattened(), out);
}

/// Appends a PING frame: a ping, or the reply to one.
pub fn ping(id: u32, out: &mut BytesMut) {
    control(6, &id.to_be_bytes(), out);
}

/// Appends a GOAWAY frame; `last` is the highest stream ID of the peer.
pub fn go_away(last: StreamId, out: &mut BytesMut) {
    let numbers = [last.to_be_bytes(), 0u32.to_be_bytes()];
    control(7, numbers.as_flattened(), out);
}

/// Appends the header of a data frame; `length` bytes of payload must follow.
pub fn data_head(stream: StreamId, length: usize, fin: bool, out: &mut BytesMut) {
    out.put_u32(stream & 0x7fff_ffff);
    let flags = if fin { u32::from(FIN) << 24 } else { 0 };
    out.put_u32(flags | (u32::try_from(length).unwrap_or(0) & 0x00ff_ffff)); // at most one chunk
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(bytes: &[u8]) -> Result<Vec<SpdyEvent>, SpdyError> {
        let (mut decoder, mut input, mut out) = (Decoder::default(), BytesMut::from(bytes), Vec::new());
        while let Some(event) = decoder.decode(&mut input)? {
            out.push(event);
        }
        Ok(out)
    }

    fn everything() -> BytesMut {
        let (mut encoder, mut out) = (Encoder::default(), BytesMut::new());
        let headers = Headers::of(&[("streamType", "stdout")]);
        encoder.syn_stream(1, &headers, &mut out).expect("packed");
        encoder.syn_reply(1, &mut out).expect("packed");
        data_head(1, 3, false, &mut out);
        out.put_slice(b"foo");
        data_head(1, 0, true, &mut out);
        ping(7, &mut out);
        reset(3, ResetStatus::Cancel, &mut out);
        control(4, &[0; 12], &mut out); // SETTINGS
        control(9, &[0; 8], &mut out); // WINDOW_UPDATE
        go_away(1, &mut out);
        out
    }

    fn expected() -> Vec<SpdyEvent> {
        vec![
            SpdyEvent::SynStream { stream: 1, fin: false, headers: Headers::of(&[("streamtype", "stdout")]) },
            SpdyEvent::SynReply { stream: 1, fin: false },
            SpdyEvent::Data { stream: 1, bytes: Bytes::from_static(b"foo"), fin: false },
            SpdyEvent::Data { stream: 1, bytes: Bytes::new(), fin: true },
            SpdyEvent::Ping(7),
            SpdyEvent::Reset { stream: 3, status: 5 },
            SpdyEvent::Ignored,
            SpdyEvent::Ignored,
            SpdyEvent::GoAway,
        ]
    }

    #[test]
    fn what_is_written_is_read_in_any_pieces() {
        assert_eq!(events(&everything()), Ok(expected()));
        let (mut decoder, mut input, mut out) = (Decoder::default(), BytesMut::new(), Vec::new());
        let mut data = Vec::new();
        for byte in everything() {
            input.put_u8(byte);
            while let Some(event) = decoder.decode(&mut input).expect("well-formed") {
                match event {
                    SpdyEvent::Data { bytes, fin: false, .. } => data.extend_from_slice(&bytes),
                    event => out.push(event),
                }
            }
        }
        let mut whole = expected();
        whole.remove(2);
        assert_eq!((data.as_slice(), out), (&b"foo"[..], whole));
    }

    #[test]
    fn frames_no_peer_may_send() {
        let rows: [(&[u8], SpdyError); 8] = [
            (&[0, 0, 0, 0, 0, 0, 0, 1], SpdyError::StreamZero),
            (&[0x80, 2, 0, 1, 0, 0, 0, 0], SpdyError::Version(2)),
            (b"\xffGET / HTTP/1.1", SpdyError::Version(0x7f47)),
            (&[0x80, 3, 0, 1, 0, 1, 0, 1], SpdyError::TooLarge(0x1_0001)),
            (&[0x80, 3, 0, 1, 0, 0, 0, 4, 0, 0, 0, 1], SpdyError::Malformed(1)),
            (&[0x80, 3, 0, 3, 0, 0, 0, 4, 0, 0, 0, 1], SpdyError::Malformed(3)),
            (&[0x80, 3, 0, 6, 0, 0, 0, 0], SpdyError::Malformed(6)),
            (&[0x80, 3, 0, 2, 0, 0, 0, 4, 0x80, 0, 0, 0], SpdyError::StreamZero),
        ];
        for (bytes, error) in rows {
            assert_eq!(events(bytes), Err(error), "{bytes:x?}");
        }
        assert_eq!(events(&[0x80, 3, 0, 99, 0, 0, 0, 1, 0]), Ok(vec![SpdyEvent::Ignored]), "an unknown kind");
        assert_eq!(events(&[0x80, 3, 0, 1, 0, 0, 0]), Ok(vec![]), "not yet a head");
    }

    #[test]
    fn a_large_frame_comes_in_pieces() {
        let mut out = BytesMut::new();
        data_head(5, 3 * CHUNK, true, &mut out);
        out.resize(HEAD + 3 * CHUNK, b'x');
        let sizes: Vec<(usize, bool)> = events(&out)
            .expect("well-formed")
            .iter()
            .map(|event| match event {
                SpdyEvent::Data { stream: 5, bytes, fin } => (bytes.len(), *fin),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(sizes, [(CHUNK, false), (CHUNK, false), (CHUNK, true)]);
    }
}
