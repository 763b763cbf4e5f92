//! Handler of `/logs/`: files of the node's log directory, and journal queries (spec 04 §5.6).
//!
//! The implementation of the port, with the help of the kernel, decides which files may be opened; this module only
//! removes `.` and `..` from a path. One task produces the response of a query; it ends with its deadline or with the
//! client.

use std::{io, io::Write, sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use tokio::{io::AsyncReadExt, sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    file_response,
    log_query::{NodeLogQuery, candidates},
    text::{escaped, plain_error},
};
use crate::ports::{NodeDirectory, NodeEntry, NodeLogError, NodeLogs};

/// Timeout of a query.
const QUERY_LIMIT: Duration = Duration::from_secs(30);
/// Timeout for the client to accept the end of a response.
const END_LIMIT: Duration = Duration::from_secs(5);
/// Read buffer size, in bytes.
const CHUNK: usize = 32 << 10;
/// Capacity of the response queue, in chunks.
const WAITING: usize = 4;

/// Handles a GET of `/logs/` and below. `path` is the decoded part after `/logs/`; `queries` is `enableSystemLogQuery`.
pub async fn read<B>(logs: &Arc<dyn NodeLogs>, queries: bool, request: &Request<B>, path: &str) -> Response {
    let query = request.uri().query().unwrap_or_default();
    if queries {
        match NodeLogQuery::parse(query) {
            Err(text) => return plain_error(StatusCode::BAD_REQUEST, &text),
            Ok(Some(_)) if !path.is_empty() => {
                return plain_error(StatusCode::NOT_ACCEPTABLE, "path not allowed in query mode");
            }
            Ok(Some(asked)) => return answer(logs, asked, request).await,
            Ok(None) => {}
        }
    }
    browse(&**logs, path, query, request.headers()).await
}

async fn answer<B>(logs: &Arc<dyn NodeLogs>, query: NodeLogQuery, request: &Request<B>) -> Response {
    let is_one_file = query.files.len() == 1 && query.services.is_empty() && !query.has_options();
    let stat = if is_one_file { stat(&**logs, &query.files[0]).await } else { None };
    if let Err(text) = query.validate(stat.as_deref()) {
        return plain_error(StatusCode::NOT_ACCEPTABLE, &text);
    }
    match query.files.first() {
        Some(file) => browse(&**logs, file, request.uri().query().unwrap_or_default(), request.headers()).await,
        None => services(logs.clone(), query, request.headers()),
    }
}

/// Reason why a file cannot be read, in the words of Go's `os.Stat`.
async fn stat(logs: &dyn NodeLogs, path: &str) -> Option<String> {
    logs.open(&clean(path)).await.err().map(|error| error.to_string())
}

/// Responds with a file, a directory listing, or a redirect to the canonical path.
async fn browse(logs: &dyn NodeLogs, path: &str, query: &str, asked: &HeaderMap) -> Response {
    if path == "index.html" || path.ends_with("/index.html") {
        return moved("./", query);
    }
    let name = clean(path);
    let wants_directory = path.is_empty() || path.ends_with('/');
    match logs.open(&name).await {
        Ok(NodeEntry::File(_)) if wants_directory => moved(&format!("../{}", encoded(base(&name))), query),
        Ok(NodeEntry::File(file)) => file_response::file(base(&name), file, asked).await,
        Ok(NodeEntry::Directory(_)) if !wants_directory => moved(&format!("{}/", encoded(base(&name))), query),
        Ok(NodeEntry::Directory(directory)) => {
            if let Ok(NodeEntry::File(index)) = logs.open(format!("{name}/index.html").trim_start_matches('/')).await {
                return file_response::file("index.html", index, asked).await;
            }
            file_response::precondition(asked, directory.modified).unwrap_or_else(|| listing(&directory))
        }
        Err(NodeLogError::Missing(_)) => plain_error(StatusCode::NOT_FOUND, "404 page not found"),
        Err(NodeLogError::Forbidden(_)) => plain_error(StatusCode::FORBIDDEN, "403 Forbidden"),
        Err(NodeLogError::Other(_)) => plain_error(StatusCode::INTERNAL_SERVER_ERROR, "500 Internal Server Error"),
    }
}

/// Removes `.`, `..`, empty segments, and leading and trailing slashes.
fn clean(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                kept.pop();
            }
            part => kept.push(part),
        }
    }
    kept.join("/")
}

fn base(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// 301 to a relative location.
fn moved(place: &str, query: &str) -> Response {
    let place = if query.is_empty() { place.to_owned() } else { format!("{place}?{query}") };
    match HeaderValue::try_from(place) {
        Ok(place) => (StatusCode::MOVED_PERMANENTLY, [(header::LOCATION, place)]).into_response(),
        Err(_) => plain_error(StatusCode::NOT_FOUND, "404 page not found"),
    }
}

fn listing(directory: &NodeDirectory) -> Response {
    let mut page = String::from("<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n");
    for (name, is_directory) in &directory.entries {
        let slash = if *is_directory { "/" } else { "" };
        page.push_str(&format!("<a href=\"{}{slash}\">{}{slash}</a>\n", escaped(&encoded(name)), escaped(name)));
    }
    page.push_str("</pre>\n");
    let mut response = ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], page).into_response();
    file_response::set_modified(&mut response, directory.modified);
    response
}

/// Encodes a name as a relative URL: it cannot end an attribute, and a colon does not start a scheme.
fn encoded(name: &str) -> String {
    let mut url = String::with_capacity(name.len());
    if name.contains(':') {
        url.push_str("./");
    }
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~$&+,:=@".contains(&byte) {
            url.push(char::from(byte));
        } else {
            url.push_str(&format!("%{byte:02X}"));
        }
    }
    url
}

/// Streams the logs of the services as they are read.
fn services(logs: Arc<dyn NodeLogs>, query: NodeLogQuery, asked: &HeaderMap) -> Response {
    let is_zipped = asked.get(header::ACCEPT_ENCODING).is_some_and(|value| value == "gzip");
    let (to, chunks) = mpsc::channel(WAITING);
    let mut out = ResponseWriter { to, zip: is_zipped.then(|| GzEncoder::new(Vec::new(), Compression::fast())) };
    tokio::spawn(async move {
        // The response contains what was read before the timeout; a disconnected client needs none.
        let _ = timeout(QUERY_LIMIT, copy(&*logs, &query, &mut out)).await;
        let _ = timeout(END_LIMIT, out.end()).await;
    });
    let body = Body::from_stream(ReceiverStream::new(chunks));
    let mut response = ([(header::CONTENT_TYPE, "text/plain;charset=UTF-8")], body).into_response();
    if is_zipped {
        response.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

/// Error of a write to a response that nobody reads anymore; it ends the copy.
struct ClientDisconnected;

async fn copy(logs: &dyn NodeLogs, query: &NodeLogQuery, out: &mut ResponseWriter) -> Result<(), ClientDisconnected> {
    let units = logs.units().await.unwrap_or_default();
    let in_journal = |service: &&str| units.contains(&format!("{service}.service"));
    let (native, other): (Vec<&str>, Vec<&str>) = query.services.iter().map(String::as_str).partition(in_journal);
    if !native.is_empty() {
        match logs.journal(&query.journal_arguments(&native)) {
            Ok(mut journal) => {
                let mut chunk = vec![0; CHUNK];
                while let Ok(read @ 1..) = journal.read(&mut chunk).await {
                    out.write(chunk.get(..read).unwrap_or_default()).await?;
                }
            }
            Err(_) if query.boot.unwrap_or(0) == 0 => out.write(b"\nerror: journal output not available\n").await?,
            Err(_) => {}
        }
    }
    if !other.is_empty() && query.has_options() {
        let list = other.join(" ");
        let text =
            format!("\noptions present and query resolved to log files for [{list}]\ntry without specifying options\n");
        return out.write(text.as_bytes()).await;
    }
    for service in other {
        copy_file(logs, service, out).await?;
    }
    Ok(())
}

async fn copy_file(logs: &dyn NodeLogs, service: &str, out: &mut ResponseWriter) -> Result<(), ClientDisconnected> {
    for name in candidates(service) {
        match logs.open(&clean(&name)).await {
            Ok(NodeEntry::File(found)) => {
                let mut file = tokio::fs::File::from_std(found.file);
                let mut chunk = vec![0; CHUNK];
                while let Ok(read @ 1..) = file.read(&mut chunk).await {
                    out.write(chunk.get(..read).unwrap_or_default()).await?;
                }
                return Ok(());
            }
            // The log of a service may be in a directory of its name.
            Ok(NodeEntry::Directory(_)) | Err(NodeLogError::Missing(_)) => {}
            Err(error) => return out.write(format!("\nerror getting log for {service}: {error}\n").as_bytes()).await,
        }
    }
    out.write(format!("\nlog not found for {service}\n").as_bytes()).await
}

/// Response writer, with optional gzip compression.
struct ResponseWriter {
    to: mpsc::Sender<io::Result<Bytes>>,
    zip: Option<GzEncoder<Vec<u8>>>,
}

impl ResponseWriter {
    async fn write(&mut self, bytes: &[u8]) -> Result<(), ClientDisconnected> {
        let chunk = match &mut self.zip {
            None => bytes.to_vec(),
            Some(zip) => {
                zip.write_all(bytes).map_err(|_| ClientDisconnected)?;
                std::mem::take(zip.get_mut())
            }
        };
        if chunk.is_empty() {
            return if self.to.is_closed() { Err(ClientDisconnected) } else { Ok(()) };
        }
        self.to.send(Ok(chunk.into())).await.map_err(|_| ClientDisconnected)
    }

    async fn end(self) -> Result<(), ClientDisconnected> {
        let Some(zip) = self.zip else { return Ok(()) };
        let rest = zip.finish().map_err(|_| ClientDisconnected)?;
        self.to.send(Ok(rest.into())).await.map_err(|_| ClientDisconnected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_never_end_an_attribute_or_leave_the_directory() {
        for (name, url) in
            [("a b", "a%20b"), ("x:y", "./x:y"), ("\"><script>", "%22%3E%3Cscript%3E"), ("a&b", "a&b"), ("ä", "%C3%A4")]
        {
            assert_eq!(encoded(name), url);
        }
        assert_eq!(escaped("<'\"&>"), "&lt;&#39;&#34;&amp;&gt;");
        for (path, expected) in
            [("", ""), ("a/../b", "b"), ("../../etc/passwd", "etc/passwd"), ("/a//./b/", "a/b"), ("..\\x", "..\\x")]
        {
            assert_eq!(clean(path), expected, "{path}");
        }
    }
}
