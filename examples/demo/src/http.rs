//! Tools `httpd` (web server for demos and failure tests) and `wget` (HTTP client).
//!
//! `/` returns the pod and the request (`/json` or `Accept: application/json`: as JSON), `/healthz` is 200 until
//! `/fail`, `/status/N` returns status N, `/load/MS` uses CPU time, `/crash` exits with code 1, `/exit/N` with N.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream, ToSocketAddrs},
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{USAGE, option};

/// Maximum number of concurrent connections; more wait.
const MOST: usize = 64;
/// Maximum size of a request or response header, bytes.
const LONGEST_HEAD: u64 = 16 << 10;
/// Read and write timeout.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum CPU load per request, milliseconds.
const LONGEST_LOAD: u64 = 60_000;

struct Request {
    line: String,
    path: String,
    headers: Vec<(String, String)>,
}

/// Serves on `:PORT` or `address:PORT` until the process exits.
pub fn serve(args: &[String]) -> io::Result<i32> {
    let port = option(args, "-p").or(args.first().map(String::as_str)).unwrap_or(":8080");
    let address = match port.strip_prefix(':').unwrap_or(port) {
        number if number.parse::<u16>().is_ok() => format!("[::]:{number}"),
        _ => port.to_owned(),
    };
    // Fallback if IPv6 is disabled.
    let plain = address.replace("[::]", "0.0.0.0");
    let listener = TcpListener::bind(&address).or_else(|_| TcpListener::bind(&plain))?;
    let mut out = io::stdout();
    writeln!(out, "httpd: listening on {}", listener.local_addr()?)?;
    let (busy, fails) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    loop {
        let Ok((stream, _)) = listener.accept() else {
            // Most likely out of descriptors: some will be free again.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        while busy.load(Ordering::Acquire) >= MOST {
            thread::sleep(Duration::from_millis(5));
        }
        busy.fetch_add(1, Ordering::AcqRel);
        let (busy, fails) = (Arc::clone(&busy), Arc::clone(&fails));
        thread::spawn(move || {
            // A client that disconnected is not reported.
            let _ = answer(&stream, &fails);
            busy.fetch_sub(1, Ordering::AcqRel);
        });
    }
}

fn answer(stream: &TcpStream, fails: &AtomicBool) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let Some(request) = read_request(stream)? else { return Ok(()) };
    let number = |prefix: &str| request.path.strip_prefix(prefix).and_then(|text| text.parse::<u64>().ok());
    let wants_json = request.path == "/json"
        || request.headers.iter().any(|(name, value)| name == "accept" && value.contains("application/json"));
    let mut ends = None;
    let (status, body) = match request.path.as_str() {
        "/healthz" if fails.load(Ordering::Relaxed) => (500, "failing on request\n".to_owned()),
        "/healthz" => (200, "ok\n".to_owned()),
        "/fail" => {
            fails.store(true, Ordering::Relaxed);
            (200, "/healthz fails from now on\n".to_owned())
        }
        "/crash" => {
            ends = Some(1);
            (200, "crashing\n".to_owned())
        }
        _ => match (number("/status/"), number("/load/"), number("/exit/")) {
            (Some(status @ 200..=599), ..) => (status, format!("{status}\n")),
            (_, Some(load), _) => (200, compute(load)),
            (.., Some(code)) => {
                ends = Some((code & 255) as i32);
                (200, "ending\n".to_owned())
            }
            _ if wants_json => (200, json(&request)),
            _ => (200, text(&request)),
        },
    };
    let kind = if wants_json { "application/json" } else { "text/plain; charset=utf-8" };
    let mut stream = stream;
    write!(
        stream,
        "HTTP/1.1 {status} {}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        if status < 400 { "OK" } else { "Error" },
        body.len()
    )?;
    stream.flush()?;
    let mut out = io::stdout();
    writeln!(out, "{} {status}", request.line)?;
    if let Some(code) = ends {
        out.flush()?;
        process::exit(code);
    }
    Ok(())
}

fn read_request(stream: &TcpStream) -> io::Result<Option<Request>> {
    let mut lines = BufReader::new(stream.take(LONGEST_HEAD)).lines();
    let Some(line) = lines.next().transpose()? else { return Ok(None) };
    let target = line.split(' ').nth(1).unwrap_or("/");
    let path = target.split('?').next().unwrap_or("/").to_owned();
    let mut headers = Vec::new();
    for header in lines {
        let header = header?;
        let Some((name, value)) = header.split_once(':') else { break };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    Ok(Some(Request { line, path, headers }))
}

fn facts() -> Vec<(String, String)> {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let variables = ["POD_NAME", "POD_NAMESPACE", "POD_IP", "NODE_NAME"];
    let set = variables.iter().filter_map(|name| std::env::var(name).ok().map(|value| ((*name).to_owned(), value)));
    std::iter::once(("hostname".to_owned(), name)).chain(set).collect()
}

fn text(request: &Request) -> String {
    let line = |(name, value): (String, String)| format!("{name}: {value}\n");
    let facts: String = facts().into_iter().map(line).collect();
    let headers: String = request.headers.iter().cloned().map(line).collect();
    format!("{facts}request: {}\n{headers}", request.line)
}

fn json(request: &Request) -> String {
    let facts: serde_json::Map<_, _> = facts().into_iter().map(|(name, value)| (name, value.into())).collect();
    let headers: serde_json::Map<_, _> =
        request.headers.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect();
    format!("{}\n", serde_json::json!({"pod": facts, "request": request.line, "headers": headers}))
}

fn compute(milliseconds: u64) -> String {
    let until = Instant::now() + Duration::from_millis(milliseconds.min(LONGEST_LOAD));
    let mut rounds = 0u64;
    while Instant::now() < until {
        rounds = std::hint::black_box(rounds.wrapping_add(1));
    }
    format!("{rounds} rounds\n")
}

/// Prints the content of a URL; exit code 1 on an error status. Accepts and ignores `-q` and `-O -`.
pub fn wget(args: &[String]) -> io::Result<i32> {
    let is_url = |arg: &&String| arg.starts_with("http://") || (!arg.starts_with('-') && arg.contains(['.', ':']));
    let Some(url) = args.iter().find(is_url) else {
        writeln!(io::stderr(), "usage: wget [-q] [-O -] http://host[:port]/path")?;
        return Ok(USAGE);
    };
    let rest = url.strip_prefix("http://").unwrap_or(url);
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let address = if has_port { host.to_owned() } else { format!("{host}:80") };
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "no address found");
    let mut connected = None;
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => {
                connected = Some(stream);
                break;
            }
            Err(error) => failure = error,
        }
    }
    let Some(mut stream) = connected else { return Err(failure) };
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET /{path} HTTP/1.0\r\nHost: {host}\r\nUser-Agent: wget\r\nConnection: close\r\n\r\n")?;
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") && !head.ends_with("\n\n") {
        if (&mut reader).take(LONGEST_HEAD).read_line(&mut head)? == 0 || head.len() as u64 > LONGEST_HEAD {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not an HTTP response"));
        }
    }
    let status = head.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok()).unwrap_or(0);
    let mut out = io::stdout().lock();
    io::copy(&mut reader, &mut out)?;
    out.flush()?;
    if (200..400).contains(&status) {
        return Ok(0);
    }
    writeln!(io::stderr(), "wget: server returned error: {status}")?;
    Ok(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(request: &str, fails: &AtomicBool) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bindable");
        let mut client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
        client.write_all(request.as_bytes()).expect("writable");
        let (server, _) = listener.accept().expect("a client");
        answer(&server, fails).expect("answered");
        drop(server);
        let mut out = String::new();
        client.read_to_string(&mut out).expect("readable");
        out
    }

    #[test]
    fn each_path_has_its_response() {
        let fails = AtomicBool::new(false);
        assert!(ask("GET /x?y HTTP/1.1\r\nHost: h\r\nX-A: b\r\n\r\n", &fails).contains("x-a: b\n"));
        assert!(ask("GET /json HTTP/1.1\r\n\r\n", &fails).contains("\"hostname\""));
        assert!(ask("GET /status/418 HTTP/1.1\r\n\r\n", &fails).starts_with("HTTP/1.1 418 "));
        assert!(ask("GET /healthz HTTP/1.1\r\n\r\n", &fails).starts_with("HTTP/1.1 200 "));
        ask("GET /fail HTTP/1.1\r\n\r\n", &fails);
        assert!(ask("GET /healthz HTTP/1.1\r\n\r\n", &fails).starts_with("HTTP/1.1 500 "));
        assert_eq!(ask("\r\n\r\n", &fails).split(' ').nth(1), Some("200"));
    }
}
