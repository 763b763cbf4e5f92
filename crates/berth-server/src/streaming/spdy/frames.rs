//! SPDY/3.1 frames: bytes to events and back (spec 04b §3). Pure.
//!
//! The payload of data frames is passed on in pieces as it comes, so that a frame of 16 MiB needs
//! no such buffer; control frames are read whole and are small. There is no flow control: the
//! protocol's windows are read and ignored, as all who speak it do.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::headers::{Headers, Packer, Unpacker};

/// Largest control frame's payload, in bytes.
const CONTROL: usize = 64 << 10;
/// Most bytes of data per frame and per event.
pub const CHUNK: usize = 32 << 10;
const VERSION: u16 = 3;
const FIN: u8 = 1;
const HEAD: usize = 8;

/// A stream's number.
pub type StreamId = u32;

/// What a peer did wrong; the connection ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpdyError {
    /// Not version 3.
    #[error("SPDY version {0} is not spoken")]
    Version(u16),
    /// A control frame beyond 64 KiB.
    #[error("a SPDY control frame of {0} bytes")]
    TooLarge(usize),
    /// A control frame of a wrong length.
    #[error("a malformed SPDY frame of type {0}")]
    Malformed(u16),
    /// Headers that cannot be used.
    #[error("SPDY headers: {0}")]
    Headers(&'static str),
    /// Stream 0.
    #[error("SPDY stream 0")]
    StreamZero,
}

/// Why a stream is reset, as its number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetStatus {
    /// The peer broke the protocol.
    ProtocolError = 1,
    /// Refused before anything was done.
    RefusedStream = 3,
    /// Not wanted any more.
    Cancel = 5,
}

/// What a peer said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A new stream.
    SynStream {
        /// Its number.
        stream: StreamId,
        /// Whether the peer will send nothing on it.
        fin: bool,
        /// What it is for.
        headers: Headers,
    },
    /// A stream of ours was accepted.
    SynReply {
        /// Its number.
        stream: StreamId,
        /// Whether the peer will send nothing on it.
        fin: bool,
    },
    /// A stream is over.
    Reset {
        /// Its number.
        stream: StreamId,
        /// Why.
        status: u32,
    },
    /// More headers, which nobody needs.
    Headers {
        /// The stream's number.
        stream: StreamId,
        /// Whether the peer will send nothing more on it.
        fin: bool,
    },
    /// A ping, or the answer to one.
    Ping(u32),
    /// The peer wants no more streams.
    GoAway,
    /// Part of a data frame.
    Data {
        /// The stream's number.
        stream: StreamId,
        /// The bytes; may be empty with `fin`.
        bytes: Bytes,
        /// Whether the peer will send nothing more on it.
        fin: bool,
    },
    /// A frame without a meaning for us.
    Ignored,
}

struct Payload {
    stream: StreamId,
    left: usize,
    fin: bool,
}

/// Reads what a peer sends.
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
    /// Takes the next event from the front of `input`; `None` where more bytes are needed.
    ///
    /// # Errors
    /// For what no peer may send; the decoder is of no use afterwards.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Event>, SpdyError> {
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

    /// As much of a data frame as is there.
    fn piece(&mut self, mut payload: Payload, input: &mut BytesMut) -> Option<Event> {
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
        Some(Event::Data { stream, bytes, fin })
    }

    fn control(&mut self, kind: u16, fin: bool, mut payload: &[u8]) -> Result<Event, SpdyError> {
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
                let packed = payload.get(2..).ok_or(malformed)?; // priority and slot
                Ok(Event::SynStream { stream, fin, headers: self.unpacker.unpack(packed)? })
            }
            2 | 8 => {
                let stream = stream(number()?)?;
                self.unpacker.unpack(payload)?;
                Ok(if kind == 2 { Event::SynReply { stream, fin } } else { Event::Headers { stream, fin } })
            }
            3 => Ok(Event::Reset { stream: stream(number()?)?, status: number()? }),
            6 => Ok(Event::Ping(number()?)),
            7 => Ok(Event::GoAway),
            _ => Ok(Event::Ignored),
        }
    }
}

/// Writes what we send.
pub struct Encoder(Packer);

impl Default for Encoder {
    fn default() -> Self {
        Self(Packer::new())
    }
}

impl Encoder {
    /// Opens a stream.
    ///
    /// # Errors
    /// If the headers cannot be packed.
    pub fn syn_stream(&mut self, stream: StreamId, headers: &Headers, out: &mut BytesMut) -> Result<(), SpdyError> {
        let mut payload = BytesMut::new();
        payload.put_u32(stream);
        payload.put_u32(0);
        payload.put_u16(0);
        self.0.pack(headers, &mut payload)?;
        control(1, &payload, out);
        Ok(())
    }

    /// Accepts a stream.
    ///
    /// # Errors
    /// If the headers cannot be packed.
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
    out.put_u32(u32::try_from(payload.len()).unwrap_or(0) & 0x00ff_ffff); // ours are short
    out.put_slice(payload);
}

/// Ends a stream.
pub fn reset(stream: StreamId, status: ResetStatus, out: &mut BytesMut) {
    let numbers = [stream.to_be_bytes(), (status as u32).to_be_bytes()];
    control(3, numbers.as_flattened(), out);
}

/// Asks whether the peer is there, or answers.
pub fn ping(id: u32, out: &mut BytesMut) {
    control(6, &id.to_be_bytes(), out);
}

/// Says that we leave; `last` is the highest stream of the peer.
pub fn go_away(last: StreamId, out: &mut BytesMut) {
    let numbers = [last.to_be_bytes(), 0u32.to_be_bytes()];
    control(7, numbers.as_flattened(), out);
}

/// The head of a data frame; `length` bytes have to follow.
pub fn data_head(stream: StreamId, length: usize, fin: bool, out: &mut BytesMut) {
    out.put_u32(stream & 0x7fff_ffff);
    let flags = if fin { u32::from(FIN) << 24 } else { 0 };
    out.put_u32(flags | (u32::try_from(length).unwrap_or(0) & 0x00ff_ffff)); // no more than a chunk
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(bytes: &[u8]) -> Result<Vec<Event>, SpdyError> {
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

    fn expected() -> Vec<Event> {
        vec![
            Event::SynStream { stream: 1, fin: false, headers: Headers::of(&[("streamtype", "stdout")]) },
            Event::SynReply { stream: 1, fin: false },
            Event::Data { stream: 1, bytes: Bytes::from_static(b"foo"), fin: false },
            Event::Data { stream: 1, bytes: Bytes::new(), fin: true },
            Event::Ping(7),
            Event::Reset { stream: 3, status: 5 },
            Event::Ignored,
            Event::Ignored,
            Event::GoAway,
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
                    Event::Data { bytes, fin: false, .. } => data.extend_from_slice(&bytes),
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
        assert_eq!(events(&[0x80, 3, 0, 99, 0, 0, 0, 1, 0]), Ok(vec![Event::Ignored]), "an unknown kind");
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
                Event::Data { stream: 5, bytes, fin } => (bytes.len(), *fin),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(sizes, [(CHUNK, false), (CHUNK, false), (CHUNK, true)]);
    }
}
