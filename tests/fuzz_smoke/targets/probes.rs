//! What servers say to probes.

use std::sync::LazyLock;

use berth::probes::plain;
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::runtime::{Builder, Runtime};

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Builder::new_current_thread().build().expect("a runtime"));

/// An answer over HTTP/1: what is judged by itself is judged as a client would, which reads a body to its end.
pub fn probe_answer(data: &[u8]) {
    let Some(status) = plain::status(data).filter(|_| data.len() <= plain::MOST_HEARD) else { return };
    let answer = async {
        let told = plain::Retold::new(data.to_vec(), tokio::io::empty());
        let (mut sender, connection) = http1::handshake(TokioIo::new(told)).await?;
        let read = async {
            let answer = sender.send_request(hyper::Request::new(Empty::<Bytes>::new())).await?;
            let status = answer.status().as_u16();
            answer.into_body().collect().await.map(|_| status)
        };
        let (read, _) = tokio::join!(read, connection);
        read
    };
    match RUNTIME.block_on(answer) {
        Ok(read) => assert_eq!(read, status),
        Err(error) => panic!("judged by itself: {status}, by a client: {error}"),
    }
}
