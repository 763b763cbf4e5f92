//! Wire format of the shim protocol: encoder and decoder of datagrams. Pure.
//!
//! ```text
//! magic u16 │ version u16 │ kind u16 │ flags u16 │ sequence u32 │ length u32 │ body (CBOR, at most 1 MiB)
//! ```
//! Numbers are little-endian. A malformed datagram is an error, never a panic: the peer may be older, newer, or broken.
//! Implements spec 09a §14.

use serde::{Serialize, de::DeserializeOwned};

use super::plan::{MAGIC, MAX_BODY, VERSION};

/// Size of the header, bytes.
pub const HEADER: usize = 16;

/// Request, response, or event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DatagramKind {
    /// A request of the agent.
    Request,
    /// The reply, with the sequence number of its request.
    Reply,
    /// An unsolicited event of the shim; its sequence number is 0.
    Event,
}

impl DatagramKind {
    fn number(self) -> u16 {
        match self {
            Self::Request => 0,
            Self::Reply => 1,
            Self::Event => 2,
        }
    }
}

/// A datagram with a valid header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagram<'a> {
    /// Kind of its body.
    pub kind: DatagramKind,
    /// Sequence number of the request.
    pub sequence: u32,
    body: &'a [u8],
}

/// Why a datagram cannot be encoded or decoded.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WireError {
    /// Not a datagram of the shim protocol.
    #[error("not a message of the shim protocol: {0}")]
    Header(&'static str),
    /// Another protocol version.
    #[error("unsupported shim protocol version {0}, expected {VERSION}")]
    Version(u16),
    /// The body exceeds [`MAX_BODY`].
    #[error("message of {0} bytes is longer than {MAX_BODY}")]
    Long(usize),
    /// The body cannot be decoded or encoded.
    #[error("invalid message body: {0}")]
    Body(String),
}

impl<'a> Datagram<'a> {
    /// Decodes the header.
    ///
    /// # Errors
    /// If the header is invalid.
    pub fn read(bytes: &'a [u8]) -> Result<Self, WireError> {
        let Some((header, body)) = bytes.split_first_chunk::<HEADER>() else {
            return Err(WireError::Header("too short"));
        };
        let [m0, m1, v0, v1, k0, k1, _, _, s0, s1, s2, s3, l0, l1, l2, l3] = *header;
        if u16::from_le_bytes([m0, m1]) != MAGIC {
            return Err(WireError::Header("wrong magic number"));
        }
        let version = u16::from_le_bytes([v0, v1]);
        if version != VERSION {
            return Err(WireError::Version(version));
        }
        let kind = match u16::from_le_bytes([k0, k1]) {
            0 => DatagramKind::Request,
            1 => DatagramKind::Reply,
            2 => DatagramKind::Event,
            _ => return Err(WireError::Header("unknown message kind")),
        };
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        if body.len() > MAX_BODY {
            return Err(WireError::Long(body.len()));
        }
        if usize::try_from(length) != Ok(body.len()) {
            return Err(WireError::Header("length does not match the header"));
        }
        Ok(Self { kind, sequence: u32::from_le_bytes([s0, s1, s2, s3]), body })
    }

    /// Decodes the body.
    ///
    /// # Errors
    /// If the body is not a `T`, or bytes follow it.
    pub fn body<T: DeserializeOwned>(&self) -> Result<T, WireError> {
        let mut rest = self.body;
        let value = ciborium::from_reader(&mut rest).map_err(|e| WireError::Body(e.to_string()))?;
        if rest.is_empty() { Ok(value) } else { Err(WireError::Body(format!("{} trailing bytes", rest.len()))) }
    }
}

/// Encodes a datagram.
///
/// # Errors
/// If the body would be too long.
pub fn write<T: Serialize>(kind: DatagramKind, sequence: u32, body: &T) -> Result<Vec<u8>, WireError> {
    let mut out = vec![0; HEADER];
    ciborium::into_writer(body, &mut out).map_err(|e| WireError::Body(e.to_string()))?;
    let length = out.len() - HEADER;
    let Some(announced) = u32::try_from(length).ok().filter(|_| length <= MAX_BODY) else {
        return Err(WireError::Long(length));
    };
    let fields = [MAGIC, VERSION, kind.number(), 0].into_iter().flat_map(u16::to_le_bytes);
    let header = fields.chain(sequence.to_le_bytes()).chain(announced.to_le_bytes());
    for (place, byte) in out.iter_mut().zip(header) {
        *place = byte;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{LaunchPlan, ProcessTarget, Reply, Scope, ShimRequest};

    #[test]
    fn what_is_written_is_read() {
        let request = ShimRequest::Signal { to: ProcessTarget::Container("c".into()), signal: 15, scope: Scope::Group };
        let bytes = write(DatagramKind::Request, 7, &request).expect("short");
        let datagram = Datagram::read(&bytes).expect("ours");
        assert_eq!((datagram.kind, datagram.sequence), (DatagramKind::Request, 7));
        assert_eq!(datagram.body::<ShimRequest>(), Ok(request));
        assert!(datagram.body::<Reply>().is_err());
        assert!(datagram.body::<LaunchPlan>().is_err());
    }

    #[test]
    fn what_is_not_ours_is_an_error() {
        let good = write(DatagramKind::Reply, 1, &Reply::Done).expect("short");
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        assert_eq!(Datagram::read(&good[..15]), Err(WireError::Header("too short")));
        assert_eq!(Datagram::read(&with(0, 0)), Err(WireError::Header("wrong magic number")));
        assert_eq!(Datagram::read(&with(2, 9)), Err(WireError::Version(9)));
        assert_eq!(Datagram::read(&with(4, 9)), Err(WireError::Header("unknown message kind")));
        assert_eq!(Datagram::read(&with(12, 99)), Err(WireError::Header("length does not match the header")));
        assert!(matches!(write(DatagramKind::Event, 0, &"x".repeat(MAX_BODY)), Err(WireError::Long(_))));
    }
}
