//! A gRPC server on a unix socket that gives fixed answers, method by method; anything else is
//! `Unimplemented`, as a server without the service says.

use std::{
    collections::HashMap,
    convert::Infallible,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use axum::{Router, body::Body, extract::Request, response::Response, routing::any};
use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::StreamBody;
use hyper::body::Frame;
use prost::Message;
use tempfile::TempDir;
use tokio::{net::UnixListener, runtime::Runtime};
use tokio_stream::wrappers::UnixListenerStream;

#[derive(Clone)]
pub enum Answer {
    Reply(Bytes),
    Refused(u32, String),
    Hang,
}

impl Answer {
    pub fn ok(message: &impl Message) -> Self {
        let body = message.encode_to_vec();
        let mut framed = BytesMut::new();
        framed.put_u8(0);
        framed.put_u32(u32::try_from(body.len()).expect("small"));
        framed.extend_from_slice(&body);
        Self::Reply(framed.freeze())
    }

    pub fn refused(code: u32, message: &str) -> Self {
        Self::Refused(code, message.to_owned())
    }
}

pub struct Server(HashMap<String, Answer>);

pub struct Running {
    socket: PathBuf,
    dir: Option<TempDir>,
    calls: Arc<Mutex<HashMap<String, usize>>>,
    // its own, so that stopping ends connections too
    runtime: Option<Runtime>,
}

impl Server {
    pub fn new() -> Self {
        Self(HashMap::new())
    }

    pub fn on(mut self, method: &str, answer: Answer) -> Self {
        self.0.insert(format!("/runtime.v1.{method}"), answer);
        self
    }

    pub async fn start(self) -> Running {
        self.start_at(tempfile::tempdir().expect("a directory")).await
    }

    pub async fn start_at(self, dir: TempDir) -> Running {
        let socket = dir.path().join("cri.sock");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = {
            let _entered = runtime.enter();
            UnixListener::bind(&socket).expect("a socket")
        };
        let calls: Arc<Mutex<HashMap<String, usize>>> = Arc::default();
        let (answers, counted) = (Arc::new(self.0), calls.clone());
        let handler = move |request: Request| {
            let (answers, counted) = (answers.clone(), counted.clone());
            async move {
                let path = request.uri().path().to_owned();
                *counted.lock().expect("lock").entry(path.clone()).or_default() += 1;
                answer(answers.get(&path)).await
            }
        };
        runtime.spawn(
            tonic::transport::Server::builder()
                .add_routes(Router::new().fallback(any(handler)).into())
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        Running { socket, dir: Some(dir), calls, runtime: Some(runtime) }
    }
}

impl Running {
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn calls(&self, method: &str) -> usize {
        self.calls.lock().expect("lock").get(&format!("/runtime.v1.{method}")).copied().unwrap_or(0)
    }

    /// Ends the server with all its connections and removes its socket.
    pub fn stop(mut self) -> TempDir {
        let runtime = self.runtime.take().expect("running");
        std::thread::spawn(move || drop(runtime)).join().expect("ends");
        std::fs::remove_file(&self.socket).expect("the socket goes");
        self.dir.take().expect("kept")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn answer(answer: Option<&Answer>) -> Response {
    let response = http::Response::builder().header("content-type", "application/grpc");
    let refused = |code: u32, message: &str| {
        let response = http::Response::builder().header("content-type", "application/grpc");
        response.header("grpc-status", code).header("grpc-message", message).body(Body::empty()).expect("a response")
    };
    match answer {
        None => refused(12, ""),
        Some(Answer::Refused(code, message)) => refused(*code, message),
        Some(Answer::Hang) => std::future::pending().await,
        Some(Answer::Reply(bytes)) => {
            let mut trailers = http::HeaderMap::new();
            trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
            let frames = [Frame::data(bytes.clone()), Frame::trailers(trailers)].map(Ok::<_, Infallible>);
            response.body(Body::new(StreamBody::new(futures::stream::iter(frames)))).expect("a response")
        }
    }
}
