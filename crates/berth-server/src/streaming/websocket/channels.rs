//! Channel messages of WebSocket streams (spec 04b §4.1). Pure.
//!
//! A message is a channel's number and bytes for it. Version 5 knows a channel 255, on which a
//! client says that it has nothing more for another one.

use bytes::{BufMut, Bytes, BytesMut};

/// A channel of exec and attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// What the process reads.
    Stdin = 0,
    /// What it prints.
    Stdout = 1,
    /// What it complains.
    Stderr = 2,
    /// How it ended.
    Status = 3,
    /// JSON sizes of the terminal.
    Resize = 4,
}

/// How many channels there are.
const CHANNELS: u8 = 5;
/// The channel on which channels are closed.
const CLOSE: u8 = 255;

/// What a client says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// Bytes for the process.
    Stdin(Bytes),
    /// Nothing more for the process.
    StdinEnds,
    /// A size.
    Resize(Bytes),
    /// Nothing that matters.
    Nothing,
}

/// A client asked to close a channel in a way that cannot be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a close message that names no channel")]
pub struct BadClose;

/// Reads a message.
///
/// # Errors
/// If it closes no channel properly; the connection is to be closed then.
pub fn read(mut message: Bytes) -> Result<Said, BadClose> {
    if message.is_empty() {
        return Ok(Said::Nothing);
    }
    let channel = message.split_to(1);
    match channel.first() {
        Some(&CLOSE) => match message.as_ref() {
            [0] => Ok(Said::StdinEnds),
            [channel] if *channel < CHANNELS => Ok(Said::Nothing),
            _ => Err(BadClose),
        },
        Some(0) => Ok(Said::Stdin(message)),
        Some(4) => Ok(Said::Resize(message)),
        _ => Ok(Said::Nothing),
    }
}

/// A message for the client.
pub fn message(channel: Channel, bytes: &[u8]) -> Bytes {
    let mut message = BytesMut::with_capacity(bytes.len() + 1);
    message.put_u8(channel as u8);
    message.put_slice(bytes);
    message.freeze()
}

/// What a port-forward with a channel per port begins with: two channels for each port, one for
/// data and one for errors, and on each first the port, the low byte before the high one.
pub fn port_greetings(ports: &[u16]) -> Vec<Bytes> {
    let greet = |(channel, port): (u8, &u16)| {
        let [low, high] = port.to_le_bytes();
        Bytes::copy_from_slice(&[channel, low, high])
    };
    (0..=u8::MAX).zip(ports.iter().flat_map(|port| [port, port])).map(greet).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clients_say() {
        let rows: [(&[u8], Result<Said, BadClose>); 12] = [
            (b"", Ok(Said::Nothing)),
            (b"\0foo", Ok(Said::Stdin(Bytes::from_static(b"foo")))),
            (b"\0", Ok(Said::Stdin(Bytes::new()))),
            (b"\x04{}", Ok(Said::Resize(Bytes::from_static(b"{}")))),
            (b"\x01x", Ok(Said::Nothing)),
            (b"\x03x", Ok(Said::Nothing)),
            (b"\x63x", Ok(Said::Nothing)),
            (&[255, 0], Ok(Said::StdinEnds)),
            (&[255, 4], Ok(Said::Nothing)),
            (&[255, 5], Err(BadClose)),
            (&[255], Err(BadClose)),
            (&[255, 0, 0], Err(BadClose)),
        ];
        for (bytes, expected) in rows {
            assert_eq!(read(Bytes::copy_from_slice(bytes)), expected, "{bytes:?}");
        }
        assert_eq!(message(Channel::Status, b"x").as_ref(), b"\x03x");
    }

    #[test]
    fn each_channel_of_a_port_begins_with_it() {
        // AC-04b-S9
        let greetings: Vec<Vec<u8>> = port_greetings(&[7000, 8000, 9000]).iter().map(|g| g.to_vec()).collect();
        let expected: [&[u8]; 6] = [
            &[0, 0x58, 0x1b],
            &[1, 0x58, 0x1b],
            &[2, 0x40, 0x1f],
            &[3, 0x40, 0x1f],
            &[4, 0x28, 0x23],
            &[5, 0x28, 0x23],
        ];
        assert_eq!(greetings, expected);
    }
}
