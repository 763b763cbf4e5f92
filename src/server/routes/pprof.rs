//! `/debug/pprof/`: profiles that `go tool pprof` and others open (spec 04 §5.7).
//!
//! Served: `profile` (processor time) and `cmdline`. There is no `heap`: the system's allocator keeps no record
//! of who asked, and one that does would cost more than it shows; nor what only Go's scheduler knows.

use std::time::Duration;

use axum::{
    http::{Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;

use super::text::{PLAIN, plain_error};
use crate::server::ports::Profiles;

/// Seconds of a profile that names none.
const DEFAULT: u64 = 30;
/// Most seconds of a profile.
const MOST: u64 = 300;

const INDEX: &str = "<html>
<head><title>/debug/pprof/</title></head>
<body>
/debug/pprof/
<table>
<tr><td><a href='cmdline'>cmdline</a></td><td>the command line, words separated by NUL</td></tr>
<tr><td><a href='profile'>profile</a></td><td>processor time; ?seconds=N, 30 where nothing is said, at most 300</td></tr>
</table>
</body>
</html>
";

/// Answers a GET of `/debug/pprof/` and below; `name` is what follows.
pub async fn serve<B>(profiles: &dyn Profiles, request: &Request<B>, name: &str) -> Response {
    match name {
        "" => ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], INDEX).into_response(),
        "cmdline" => {
            let headers = [(header::CONTENT_TYPE, PLAIN), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
            (headers, profiles.command_line()).into_response()
        }
        "profile" => processor(profiles, request.uri().query().unwrap_or_default()).await,
        _ => plain_error(StatusCode::NOT_FOUND, "Unknown profile"),
    }
}

async fn processor(profiles: &dyn Profiles, query: &str) -> Response {
    let seconds = seconds(query);
    if seconds > MOST {
        return plain_error(StatusCode::BAD_REQUEST, "profile duration exceeds server's WriteTimeout");
    }
    match profiles.processor(Duration::from_secs(seconds)).await {
        Ok(profile) => file("profile", profile),
        Err(error) => {
            let text = format!("Could not enable CPU profiling: {error}");
            plain_error(StatusCode::INTERNAL_SERVER_ERROR, &text)
        }
    }
}

/// What is asked for; the default where that is nothing sensible.
fn seconds(query: &str) -> u64 {
    let value = form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == "seconds");
    value.and_then(|(_, value)| value.parse().ok()).filter(|seconds| *seconds > 0).unwrap_or(DEFAULT)
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
    use crate::server::ports::ProfileError;

    /// Tells how long it was asked for; one of a second is always being taken already.
    struct Clock;

    #[async_trait]
    impl Profiles for Clock {
        async fn processor(&self, time: Duration) -> Result<Bytes, ProfileError> {
            if time == Duration::from_secs(1) { Err(ProfileError::Busy) } else { Ok(format!("{time:?}").into()) }
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
            ("heap", "", 404, "Unknown profile\n"),
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
