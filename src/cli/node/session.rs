//! Remote command streams over WebSocket, client side (spec 04b §4.1).

use std::{
    future::pending,
    io::{self, Read},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::{BufMut, Bytes, BytesMut};
use futures::{SinkExt, StreamExt};
use http::{StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::timeout,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, handshake::derive_accept_key, protocol::Role},
};

use super::{OutputReader, node_client::NodeClient, show, terminal};

/// Subprotocol that can close standard input.
const ENDS_INPUT: &str = "v5.channel.k8s.io";
const VERSIONS: &str = "v5.channel.k8s.io, v4.channel.k8s.io";
/// Channel numbers of the remote command protocol.
const INPUT: u8 = 0;
const OUTPUT: u8 = 1;
const COMPLAINTS: u8 = 2;
const END: u8 = 3;
const SIZE: u8 = 4;
const CLOSE: u8 = 255;
/// Maximum bytes of standard input per message.
const PIECE: usize = 32 << 10;
/// Capacity of the send queue, in messages.
const OUTGOING: usize = 4;
/// Timeout of the WebSocket close.
const FAREWELL: Duration = Duration::from_secs(1);

/// Streams that are attached to the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SessionStreams {
    /// Whether our standard input is attached.
    pub(super) input: bool,
    /// Whether the command gets a terminal, with the size of ours.
    pub(super) terminal: bool,
}

/// Status message on the error channel: how the command ended.
#[derive(Deserialize, Default)]
#[serde(default)]
struct CommandStatus {
    status: String,
    message: String,
    reason: String,
    details: Details,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Details {
    causes: Vec<StatusCause>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct StatusCause {
    reason: String,
    message: String,
}

/// Runs a session to its end; returns the command's exit code.
pub(super) async fn run(client: &NodeClient, path: &str, streams: SessionStreams) -> Result<u8> {
    let key = BASE64_STANDARD.encode(rand::random::<[u8; 16]>());
    let asked = [
        (header::CONNECTION, "Upgrade"),
        (header::UPGRADE, "websocket"),
        (header::SEC_WEBSOCKET_VERSION, "13"),
        (header::SEC_WEBSOCKET_KEY, key.as_str()),
        (header::SEC_WEBSOCKET_PROTOCOL, VERSIONS),
    ];
    let answer = client.get(path, &asked).await?;
    let header = |name| answer.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let is_accepted = header(header::SEC_WEBSOCKET_ACCEPT) == derive_accept_key(key.as_bytes());
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS || !is_accepted {
        bail!("cannot upgrade the connection to WebSocket: {}", answer.status());
    }
    let ends_input = header(header::SEC_WEBSOCKET_PROTOCOL) == ENDS_INPUT;
    let upgraded = hyper::upgrade::on(answer).await.context("the node closed the connection")?;
    let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Client, None).await;
    let (mut to, mut from) = socket.split();
    let mut resized = signal(SignalKind::window_change())?;
    if let Some(size) = terminal::size().filter(|_| streams.terminal) {
        to.send(message(SIZE, size.as_bytes())).await.context("the node closed the connection")?;
    }
    let mut input = streams.input.then(standard_input);
    // Sending must not block receiving: a command that waits until its output is read takes no input.
    let (outbox, mut outgoing) = mpsc::channel::<Message>(OUTGOING);
    let writer = tokio::spawn(async move {
        while let Some(frame) = outgoing.recv().await {
            if to.send(frame).await.is_err() {
                return; // the receiving side gets the cause
            }
        }
        let _ = to.close().await; // the session is complete
    });
    let code = loop {
        tokio::select! {
            received = from.next() => {
                let Some(Ok(received)) = received else { bail!("the node closed the connection before the command exited") };
                if let Some(code) = handle_message(received)? {
                    break code;
                }
            }
            (room, read) = async { (outbox.reserve().await, next(&mut input).await) } => {
                let frame = match read {
                    Some(bytes) => Some(message(INPUT, &bytes)),
                    None => {
                        input = None;
                        ends_input.then(|| message(CLOSE, &[INPUT]))
                    }
                };
                // If the queue is closed, the receiving side gets the cause.
                if let (Some(frame), Ok(room)) = (frame, room) {
                    room.send(frame);
                }
            }
            Some(()) = resized.recv(), if streams.terminal => {
                if let Some(size) = terminal::size() {
                    let _ = outbox.try_send(message(SIZE, size.as_bytes())); // the next resize sends it again
                }
            }
        }
    };
    drop(outbox);
    let _ = timeout(FAREWELL, writer).await;
    Ok(code)
}

/// Reads standard input on a thread that is never joined: it may never reach the end of input.
fn standard_input() -> mpsc::Receiver<Vec<u8>> {
    let (sender, read) = mpsc::channel(1);
    thread::spawn(move || {
        let mut piece = vec![0; PIECE];
        loop {
            match io::stdin().read(&mut piece) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => return,
                Ok(read) => {
                    let bytes = piece.get(..read).unwrap_or_default().to_vec();
                    if sender.blocking_send(bytes).is_err() {
                        return; // the session is over
                    }
                }
            }
        }
    });
    read
}

/// Next piece of standard input, `None` at its end; pending forever if no input is attached.
async fn next(input: &mut Option<mpsc::Receiver<Vec<u8>>>) -> Option<Vec<u8>> {
    match input {
        Some(input) => input.recv().await,
        None => pending().await,
    }
}

fn message(channel: u8, bytes: &[u8]) -> Message {
    let mut message = BytesMut::with_capacity(bytes.len() + 1);
    message.put_u8(channel);
    message.put_slice(bytes);
    Message::Binary(message.freeze())
}

/// Handles a message: prints output, or returns the exit code.
fn handle_message(message: Message) -> Result<Option<u8>> {
    let bytes = match message {
        Message::Binary(bytes) => bytes,
        Message::Text(text) => Bytes::from(text),
        Message::Close(_) => bail!("the node closed the connection before the command exited"),
        Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => return Ok(None),
    };
    let Some((&channel, payload)) = bytes.split_first() else { return Ok(None) };
    match channel {
        // Our standard output was closed: no more of the command is needed.
        OUTPUT if show(io::stdout().lock(), payload)? == OutputReader::Left => return Ok(Some(0)),
        // Standard output may still have a reader.
        COMPLAINTS => _ = show(io::stderr().lock(), payload)?,
        END if !payload.is_empty() => return exit_code(payload).map(Some),
        _ => {}
    }
    Ok(None)
}

/// Parses the exit code; a failure without one is an error. Pure.
fn exit_code(status: &[u8]) -> Result<u8> {
    let ended: CommandStatus = serde_json::from_slice(status).context("cannot parse the exit status of the command")?;
    if ended.status == "Success" {
        return Ok(0);
    }
    let code = ended.details.causes.iter().find(|cause| cause.reason == "ExitCode");
    match code.and_then(|cause| cause.message.parse::<i32>().ok()) {
        Some(code) if ended.reason == "NonZeroExitCode" => Ok(u8::try_from(code & 0xff).unwrap_or(1)),
        _ => bail!("{}", crate::cli::table::sanitize(&ended.message)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_commands_end() {
        let code = |code: &str| {
            format!(
                r#"{{"status":"Failure","reason":"NonZeroExitCode","details":{{"causes":[{{"reason":"ExitCode","message":"{code}"}}]}}}}"#
            )
        };
        for (status, expected) in [
            (r#"{"metadata":{},"status":"Success"}"#.to_owned(), Ok(0)),
            (code("7"), Ok(7)),
            (code("137"), Ok(137)),
            (code("x"), Err("")),
            (
                r#"{"status":"Failure","message":"no\u001bsuch","reason":"InternalError"}"#.to_owned(),
                Err("no\u{fffd}such"),
            ),
            ("garbage".to_owned(), Err("cannot parse the exit status of the command")),
        ] {
            let result = exit_code(status.as_bytes()).map_err(|error| error.to_string());
            assert_eq!(result, expected.map_err(str::to_owned), "{status}");
        }
    }
}
