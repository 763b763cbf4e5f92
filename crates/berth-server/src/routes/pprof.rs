//! Handler of `/debug/pprof/`: profiles for `go tool pprof` and compatible tools (spec 04 §5.7).
//!
//! Supported: `profile` (CPU time), `heap` and `allocs` (memory), `cmdline`, and `goroutine` in text form, which lists
//! threads. Profiles of Go's scheduler are not available.

use std::time::Duration;

use axum::{
    http::{Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;

use super::text::{PLAIN, plain_error};
use crate::ports::{MemoryView, Profiles};

/// Default duration of a profile, in seconds.
const DEFAULT: u64 = 30;
/// Maximum duration of a profile, in seconds.
const MOST: u64 = 300;
const TOO_LONG: &str = "profile duration exceeds server's WriteTimeout";

const INDEX: &str = "<html>
<head><title>/debug/pprof/</title></head>
<body>
/debug/pprof/
<table>
<tr><td><a href='allocs'>allocs</a></td><td>A sampling of all past memory allocations; same parameters as heap</td></tr>
<tr><td><a href='cmdline'>cmdline</a></td><td>The command line invocation of the current program, arguments separated by NUL</td></tr>
<tr><td><a href='goroutine?debug=1'>goroutine?debug=1</a></td><td>Names and states of all threads</td></tr>
<tr><td><a href='heap'>heap</a></td><td>A sampling of memory allocations of live objects since the first request for a memory profile, or within ?seconds=N</td></tr>
<tr><td><a href='profile'>profile</a></td><td>CPU profile; ?seconds=N sets the duration, default 30, maximum 300</td></tr>
</table>
</body>
</html>
";

/// Handles a GET of `/debug/pprof/` and below; `name` is the rest of the path.
pub async fn serve<B>(profiles: &dyn Profiles, request: &Request<B>, name: &str) -> Response {
    let query = request.uri().query().unwrap_or_default();
    match name {
        "" => ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], INDEX).into_response(),
        "cmdline" => {
            let headers = [(header::CONTENT_TYPE, PLAIN), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
            (headers, profiles.command_line()).into_response()
        }
        "heap" => memory(profiles, MemoryView::InUse, (name, query)).await,
        "allocs" => memory(profiles, MemoryView::Allocated, (name, query)).await,
        "goroutine" if parameter(query, "debug").is_some_and(|debug| debug != "0") => {
            let headers = [(header::CONTENT_TYPE, PLAIN), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
            (headers, profiles.threads()).into_response()
        }
        "profile" => processor(profiles, query).await,
        _ => plain_error(StatusCode::NOT_FOUND, "Unknown profile"),
    }
}

async fn processor(profiles: &dyn Profiles, query: &str) -> Response {
    let seconds = seconds(query);
    if seconds > MOST {
        return plain_error(StatusCode::BAD_REQUEST, TOO_LONG);
    }
    match profiles.processor(Duration::from_secs(seconds)).await {
        Ok(profile) => file("profile", profile),
        Err(error) => {
            let text = format!("Could not enable CPU profiling: {error}");
            plain_error(StatusCode::INTERNAL_SERVER_ERROR, &text)
        }
    }
}

/// Responds with a heap profile, or with its changes over a time (`?seconds=N`).
async fn memory(profiles: &dyn Profiles, view: MemoryView, (name, query): (&str, &str)) -> Response {
    let bad = |text: &str| plain_error(StatusCode::BAD_REQUEST, text);
    if parameter(query, "debug").is_some_and(|debug| debug != "0") {
        return bad("debug is not supported for this profile type");
    }
    let time = match parameter(query, "seconds").map(|seconds| seconds.parse::<u64>()) {
        None => None,
        Some(Ok(seconds @ 1..=MOST)) => Some(Duration::from_secs(seconds)),
        Some(Ok(1..)) => return bad(TOO_LONG),
        Some(_) => return bad("invalid value for \"seconds\" - must be a positive integer"),
    };
    match profiles.memory(view, time).await {
        Ok(profile) if time.is_some() => file(&format!("{name}-delta"), profile),
        Ok(profile) => file(name, profile),
        Err(error) => plain_error(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// Requested duration; the default where it is missing or invalid.
fn seconds(query: &str) -> u64 {
    let value = parameter(query, "seconds");
    value.and_then(|value| value.parse().ok()).filter(|seconds| *seconds > 0).unwrap_or(DEFAULT)
}

fn parameter(query: &str, name: &str) -> Option<String> {
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    pairs.find(|(key, value)| key == name && !value.is_empty()).map(|(_, value)| value.into_owned())
}

fn file(name: &str, content: Bytes) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{name}\"")),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
    ];
    (headers, content).into_response()
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use axum::body::Body;
    use http_body_util::BodyExt;

    use super::*;
    use crate::ports::ProfileError;

    /// Records the requested duration; a profile of one second is always busy.
    struct Clock;

    #[async_trait]
    impl Profiles for Clock {
        async fn processor(&self, time: Duration) -> Result<Bytes, ProfileError> {
            if time == Duration::from_secs(1) { Err(ProfileError::Busy) } else { Ok(format!("{time:?}").into()) }
        }

        async fn memory(&self, view: MemoryView, time: Option<Duration>) -> Result<Bytes, ProfileError> {
            if time == Some(Duration::from_secs(1)) {
                return Err(ProfileError::Failed("no room".to_owned()));
            }
            Ok(format!("{view:?} {time:?}").into())
        }

        fn threads(&self) -> String {
            "threads: 1\n".to_owned()
        }

        fn command_line(&self) -> Bytes {
            Bytes::from_static(b"berth\0--v=2")
        }
    }

    #[tokio::test]
    async fn profiles_by_name() {
        for (name, query, status, body) in [
            ("", "", 200, INDEX),
            ("cmdline", "", 200, "berth\0--v=2"),
            ("profile", "", 200, "30s"),
            ("profile", "seconds=5", 200, "5s"),
            ("profile", "seconds=-1", 200, "30s"),
            ("profile", "seconds=x", 200, "30s"),
            ("profile", "seconds=301", 400, "profile duration exceeds server's WriteTimeout\n"),
            ("profile", "seconds=1", 500, "Could not enable CPU profiling: cpu profiling already in use\n"),
            ("heap", "", 200, "InUse None"),
            ("heap", "gc=1&debug=0", 200, "InUse None"),
            ("heap", "seconds=300", 200, "InUse Some(300s)"),
            ("heap", "seconds=301", 400, "profile duration exceeds server's WriteTimeout\n"),
            ("heap", "seconds=0", 400, "invalid value for \"seconds\" - must be a positive integer\n"),
            ("heap", "seconds=-3", 400, "invalid value for \"seconds\" - must be a positive integer\n"),
            ("heap", "debug=1", 400, "debug is not supported for this profile type\n"),
            ("heap", "seconds=1", 500, "no room\n"),
            ("allocs", "seconds=2", 200, "Allocated Some(2s)"),
            ("goroutine", "debug=2", 200, "threads: 1\n"),
            ("goroutine", "", 404, "Unknown profile\n"),
            ("block", "", 404, "Unknown profile\n"),
            ("mutex", "debug=1", 404, "Unknown profile\n"),
            ("threadcreate", "", 404, "Unknown profile\n"),
            ("trace", "", 404, "Unknown profile\n"),
            ("../configz", "", 404, "Unknown profile\n"),
        ] {
            let request = Request::get(format!("/debug/pprof/?{query}")).body(Body::empty()).expect("a request");
            let response = serve(&Clock, &request, name).await;
            let answered =
                (response.status().as_u16(), response.into_body().collect().await.expect("a body").to_bytes());
            assert_eq!(answered, (status, Bytes::from(body)), "{name}?{query}");
        }
    }
}
