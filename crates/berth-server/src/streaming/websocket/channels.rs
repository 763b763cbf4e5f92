//! Channel messages of Kubernetes WebSocket streams: encoding and decoding (spec 04b §4.1). Pure.
//!
//! A message is a channel number followed by bytes. Version 5 adds channel 255, on which a client half-closes another
//! channel.

use bytes::{BufMut, Bytes, BytesMut};

/// Channel of exec and attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Standard input.
    Stdin = 0,
    /// Standard output.
    Stdout = 1,
    /// Standard error.
    Stderr = 2,
    /// Exit status.
    Status = 3,
    /// Terminal sizes as JSON.
    Resize = 4,
}

/// Number of channels.
const CHANNELS: u8 = 5;
/// Channel whose messages half-close other channels.
const CLOSE: u8 = 255;

/// Decoded message of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChannelMessage {
    /// Bytes for standard input.
    Stdin(Bytes),
    /// End of standard input.
    StdinEnds,
    /// Terminal size as JSON.
    Resize(Bytes),
    /// Message without effect.
    Nothing,
}

/// Invalid message on the close channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("close message does not contain a channel number")]
pub struct BadClose;

/// Decodes a message.
///
/// # Errors
/// If a message on the close channel names no valid channel; the connection must be closed then.
pub fn read(mut message: Bytes) -> Result<ChannelMessage, BadClose> {
    if message.is_empty() {
        return Ok(ChannelMessage::Nothing);
    }
    let channel = message.split_to(1);
    match channel.first() {
        Some(&CLOSE) => match message.as_ref() {
            [0] => Ok(ChannelMessage::StdinEnds),
            [channel] if *channel < CHANNELS => Ok(ChannelMessage::Nothing),
            _ => Err(BadClose),
        },
        Some(0) => Ok(ChannelMessage::Stdin(message)),
        Some(4) => Ok(ChannelMessage::Resize(message)),
        _ => Ok(ChannelMessage::Nothing),
    }
}

/// Encodes a message for the client.
pub fn message(channel: Channel, bytes: &[u8]) -> Bytes {
    let mut message = BytesMut::with_capacity(bytes.len() + 1);
    message.put_u8(channel as u8);
    message.put_slice(bytes);
    message.freeze()
}

/// First messages of a port-forward with channels per port: each port has two channels, data and error, and the first
/// message on each is the port in little-endian order.
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
    fn client_messages_are_decoded() {
        let rows: [(&[u8], Result<ChannelMessage, BadClose>); 12] = [
            (b"", Ok(ChannelMessage::Nothing)),
            (b"\0foo", Ok(ChannelMessage::Stdin(Bytes::from_static(b"foo")))),
            (b"\0", Ok(ChannelMessage::Stdin(Bytes::new()))),
            (b"\x04{}", Ok(ChannelMessage::Resize(Bytes::from_static(b"{}")))),
            (b"\x01x", Ok(ChannelMessage::Nothing)),
            (b"\x03x", Ok(ChannelMessage::Nothing)),
            (b"\x63x", Ok(ChannelMessage::Nothing)),
            (&[255, 0], Ok(ChannelMessage::StdinEnds)),
            (&[255, 4], Ok(ChannelMessage::Nothing)),
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
