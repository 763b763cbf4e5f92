//! Fuzz targets of the kubelet server: log queries, SPDY frames, and WebSocket messages.

use std::{collections::BTreeMap, io};

use berth_server::{
    routes::log_query::NodeLogQuery,
    streaming::{
        spdy::{
            StreamId,
            frames::{CHUNK, Decoder, SpdyEvent},
        },
        websocket::{
            self,
            channels::{self, ChannelMessage},
        },
    },
};
use bytes::{Bytes, BytesMut};
use tokio_tungstenite::tungstenite::{WebSocket, protocol::Role};

/// The query of `/logs/`: an accepted query is safe as arguments of `journalctl`.
pub fn log_query(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let query = match NodeLogQuery::parse(text) {
        Ok(Some(query)) => query,
        Ok(None) => return,
        Err(error) => return assert!(error.len() <= 16 * text.len() + 1024, "{} bytes of complaints", error.len()),
    };
    if query.validate(None).is_err() {
        return;
    }
    assert!(query.services.len() <= 4 && query.files.len() <= 1);
    let services: Vec<&str> = query.services.iter().map(String::as_str).collect();
    for service in &services {
        assert!(service.len() <= 256 && service.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.:@-".contains(&b)));
    }
    let arguments = query.journal_arguments(&services);
    let is_known =
        |argument: &String| argument.starts_with("--") || argument.parse::<i64>().is_ok_and(|boot| boot <= 0);
    assert!(arguments.iter().all(is_known), "{arguments:?}");
}

/// SPDY frames of a peer: the result does not depend on the chunks of the read.
pub fn spdy_frames(data: &[u8]) {
    let read = |piece: usize| {
        let (mut decoder, mut input) = (Decoder::default(), BytesMut::new());
        let (mut events, mut payload) = (Vec::new(), BTreeMap::<StreamId, Vec<u8>>::new());
        for bytes in data.chunks(piece.max(1)) {
            input.extend_from_slice(bytes);
            loop {
                match decoder.decode(&mut input) {
                    Ok(Some(SpdyEvent::Data { stream, bytes, fin })) => {
                        assert!(bytes.len() <= CHUNK && stream != 0);
                        payload.entry(stream).or_default().extend_from_slice(&bytes);
                        if fin {
                            events.push(SpdyEvent::Data { stream, bytes: Bytes::new(), fin });
                        }
                    }
                    Ok(Some(event)) => {
                        if let SpdyEvent::SynStream { headers, .. } = &event {
                            assert!(headers.len() <= 64);
                        }
                        events.push(event);
                    }
                    Ok(None) => break,
                    Err(error) => return (events, payload, Some(error)),
                }
            }
        }
        (events, payload, None)
    };
    assert_eq!(read(data.len()), read(7));
}

/// Client messages on a WebSocket: channel messages, or SPDY in pieces.
pub fn websocket_tunnel(data: &[u8]) {
    struct Client<'a>(&'a [u8]);
    impl io::Read for Client<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.read(buffer)
        }
    }
    impl io::Write for Client<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut socket = WebSocket::from_raw_socket(Client(data), Role::Server, Some(websocket::limits()));
    let (mut decoder, mut tunnelled, mut is_spdy) = (Decoder::default(), BytesMut::new(), true);
    while let Ok(message) = socket.read() {
        if message.is_close() {
            break; // the codec chose the close reason
        }
        let bytes = message.into_data();
        assert!(bytes.len() <= data.len(), "nobody sent that much");
        tunnelled.extend_from_slice(&bytes);
        while is_spdy {
            match decoder.decode(&mut tunnelled) {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => is_spdy = false,
            }
        }
        if let Ok(ChannelMessage::Stdin(payload) | ChannelMessage::Resize(payload)) = channels::read(bytes.clone()) {
            assert_eq!(payload.len() + 1, bytes.len());
        }
    }
}
