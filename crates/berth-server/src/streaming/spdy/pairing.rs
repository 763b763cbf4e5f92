//! Pairing of data and error streams of a SPDY port-forward connection (spec 04b §3.2). Pure.
//!
//! A connection carries many forwards; each uses two streams, one for data and one for errors.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::{Headers, StreamId};
use berth_config::text::quote;

/// Timeout for the second stream of a pair.
pub const CREATION: Duration = Duration::from_secs(30);

/// Half of a stream pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairHalf {
    /// Carries the forwarded bytes.
    Data,
    /// Carries an error text.
    Error,
}

/// Action for a new stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PairingAction {
    /// Reset the stream, for this reason.
    Reset(String),
    /// Store the stream under the request ID until the other half arrives.
    Wait {
        /// Request ID.
        request: String,
        /// The half that arrived.
        half: PairHalf,
    },
    /// The pair already has this half: write the text to the error stream, if there is one, and reset the new stream.
    Taken {
        /// Request ID.
        request: String,
        /// Error text.
        text: String,
    },
    /// The pair is complete: forward.
    Connect {
        /// Request ID.
        request: String,
        /// The half that arrived last.
        half: PairHalf,
        /// Target port.
        port: u16,
    },
}

struct UnpairedHalf {
    half: PairHalf,
    since: Instant,
}

/// Incomplete and connected pairs of one connection.
#[derive(Default)]
pub struct Pairs {
    waiting: BTreeMap<String, UnpairedHalf>,
    connected: BTreeMap<String, ()>,
}

impl Pairs {
    /// Adds a new stream and returns the action for it.
    pub fn arrive(&mut self, stream: StreamId, headers: &Headers, now: Instant) -> PairingAction {
        let (port, half) = match (port(headers), half(headers)) {
            (Err(text), _) | (_, Err(text)) => return PairingAction::Reset(text),
            (Ok(port), Ok(half)) => (port, half),
        };
        let request = request(stream, headers, half);
        let taken = |half: PairHalf| {
            let kind = if half == PairHalf::Data { "data" } else { "error" };
            format!("error processing stream for request {request}: {kind} stream already assigned")
        };
        if self.connected.contains_key(&request) {
            return PairingAction::Taken { text: taken(half), request };
        }
        match self.waiting.get(&request) {
            None => {
                self.waiting.insert(request.clone(), UnpairedHalf { half, since: now });
                PairingAction::Wait { request, half }
            }
            Some(first) if first.half == half => PairingAction::Taken { text: taken(half), request },
            Some(_) => {
                self.waiting.remove(&request);
                self.connected.insert(request.clone(), ());
                PairingAction::Connect { request, half, port }
            }
        }
    }

    /// Removes an ended forward; its request ID may be reused.
    pub fn ended(&mut self, request: &str) {
        self.connected.remove(request);
    }

    /// Removes and returns the requests whose other half did not arrive within [`CREATION`].
    pub fn overdue(&mut self, now: Instant) -> Vec<String> {
        let late = |waiting: &UnpairedHalf| now.saturating_duration_since(waiting.since) >= CREATION;
        let names: Vec<String> = self.waiting.iter().filter(|(_, w)| late(w)).map(|(name, _)| name.clone()).collect();
        for name in &names {
            self.waiting.remove(name);
        }
        names
    }
}

/// Text for the error stream of a failed forward.
pub fn failed(port: u16, sandbox: &str, why: &str) -> String {
    format!("error forwarding port {port} to pod {sandbox}, uid : {why}")
}

fn port(headers: &Headers) -> Result<u16, String> {
    let text = headers.get("port").filter(|text| !text.is_empty()).ok_or("\"port\" header is required")?;
    let wrong = |why| format!("unable to parse {0} as a port: strconv.ParseUint: parsing {0}: {why}", quote(text));
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong("invalid syntax"));
    }
    match text.parse() {
        Ok(0) => Err(format!("port {} must be > 0", quote(text))),
        Ok(port) => Ok(port),
        Err(_) => Err(wrong("value out of range")),
    }
}

fn half(headers: &Headers) -> Result<PairHalf, String> {
    match headers.get("streamtype").unwrap_or_default() {
        "" => Err("\"streamType\" header is required".to_owned()),
        "data" => Ok(PairHalf::Data),
        "error" => Ok(PairHalf::Error),
        other => Err(format!("invalid stream type {}", quote(other))),
    }
}

/// Old clients send no request ID: their data stream ID is the error stream ID plus 2.
fn request(stream: StreamId, headers: &Headers, half: PairHalf) -> String {
    match headers.get("requestid").filter(|name| !name.is_empty()) {
        Some(name) => name.to_owned(),
        None if half == PairHalf::Error => stream.to_string(),
        None => stream.saturating_sub(2).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(port: &str, kind: &str, request: &str) -> Headers {
        Headers::of(&[("port", port), ("streamType", kind), ("requestID", request)])
    }

    #[test]
    fn two_halves_make_a_forward() {
        let now = Instant::now();
        let mut pairs = Pairs::default();
        let mut arrive = |stream, port, kind, request| pairs.arrive(stream, &headers(port, kind, request), now);
        let wait = |request: &str, half| PairingAction::Wait { request: request.to_owned(), half };
        let connect = |request: &str, half, port| PairingAction::Connect { request: request.to_owned(), half, port };
        assert_eq!(arrive(1, "80", "error", "0"), wait("0", PairHalf::Error));
        assert_eq!(arrive(3, "81", "data", "1"), wait("1", PairHalf::Data));
        assert_eq!(arrive(5, "80", "data", "0"), connect("0", PairHalf::Data, 80));
        assert_eq!(arrive(7, "81", "error", "1"), connect("1", PairHalf::Error, 81));
        assert_eq!(arrive(9, "80", "error", ""), wait("9", PairHalf::Error), "an old client");
        assert_eq!(arrive(11, "80", "data", ""), connect("9", PairHalf::Data, 80));
        let text = "error processing stream for request 0: data stream already assigned".to_owned();
        assert_eq!(arrive(13, "80", "data", "0"), PairingAction::Taken { request: "0".to_owned(), text });
        assert_eq!(arrive(15, "80", "data", "2"), wait("2", PairHalf::Data));
        let text = "error processing stream for request 2: data stream already assigned".to_owned();
        assert_eq!(arrive(17, "80", "data", "2"), PairingAction::Taken { request: "2".to_owned(), text });
        assert_eq!(pairs.overdue(now + CREATION - Duration::from_secs(1)), Vec::<String>::new());
        assert_eq!(pairs.overdue(now + CREATION), ["2"]);
        pairs.ended("0");
        assert_eq!(pairs.arrive(19, &headers("80", "data", "0"), now), wait("0", PairHalf::Data));
        assert_eq!(failed(80, "s", "refused"), "error forwarding port 80 to pod s, uid : refused");
    }

    #[test]
    fn streams_that_fit_nowhere() {
        let rows = [
            ("", "data", "\"port\" header is required"),
            ("x", "data", "unable to parse \"x\" as a port: strconv.ParseUint: parsing \"x\": invalid syntax"),
            (
                "65536",
                "data",
                "unable to parse \"65536\" as a port: strconv.ParseUint: parsing \"65536\": value out of range",
            ),
            ("0", "data", "port \"0\" must be > 0"),
            ("80", "", "\"streamType\" header is required"),
            ("80", "x", "invalid stream type \"x\""),
        ];
        for (port, kind, text) in rows {
            let step = Pairs::default().arrive(1, &headers(port, kind, "0"), Instant::now());
            assert_eq!(step, PairingAction::Reset(text.to_owned()));
        }
    }
}
