//! CSR creation and waiting, against a scripted API server.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use serde_json::json;

use super::*;
use crate::{
    certificates::testing::{Authority, DAY, approved, list, stored},
    testing::{FakeApi, event, refused},
};

fn request() -> SigningRequest {
    SigningRequest::new(Template::client("n"), PrivateKey::generate().expect("a key"), NamingScheme::Rotation)
        .expect("a request")
}

type StoredObjects = Arc<Mutex<Vec<Value>>>;

/// Stores created objects and lists them; `more` answers every other request.
fn keeping(
    kept: StoredObjects,
    mut more: impl FnMut(&Call) -> Option<Result<Value, ApiError>> + Send + 'static,
) -> Arc<FakeApi> {
    FakeApi::new(move |call| {
        if let Some(answer) = more(call) {
            return answer;
        }
        let mut kept = kept.lock().expect("not poisoned");
        match call.verb {
            Verb::Create => {
                kept.push(stored(call, "u"));
                Ok(kept[kept.len() - 1].clone())
            }
            Verb::Get => Ok(kept[0].clone()),
            _ => Ok(list(&kept)),
        }
    })
}

#[tokio::test(start_paused = true)]
async fn a_certificate_comes_after_approval() {
    let (kept, authority) = (StoredObjects::default(), Authority::new());
    let api = keeping(kept.clone(), |_| None);
    let events = api.next_watch();
    let mut request = request();
    request.make(&*api, 0).await.expect("made");
    let made = kept.lock().expect("not poisoned")[0].clone();
    // The first change has the approval and no certificate (spec 10a §12).
    events.send(event("BOOKMARK", json!({"metadata": {"resourceVersion": "6"}}))).expect("listening");
    events.send(event("MODIFIED", approved(&made))).expect("listening");
    events.send(event("MODIFIED", authority.answer(&made, 0, DAY))).expect("listening");
    let chain = request.wait(&*api).await.expect("a certificate");
    assert!(chain.starts_with("-----BEGIN CERTIFICATE-----"));
    let selector = format!("metadata.name={}", request.name());
    for call in &api.calls()[1..] {
        assert!(call.query.contains(&("fieldSelector", selector.clone())), "{call:?}");
        assert_eq!(call.line, RequestClass::Certificates);
    }
    assert!(api.calls()[2].query.contains(&("resourceVersion", "5".to_owned())), "from where the list was");
}

#[tokio::test(start_paused = true)]
async fn what_ends_the_wait() {
    let decided = |kind: &'static str| {
        move |made: &Value| {
            let mut object = made.clone();
            object["status"] = json!({"conditions": [{"type": kind, "reason": "R", "message": "m"}]});
            event("MODIFIED", object)
        }
    };
    let other = |made: &Value| {
        let mut object = made.clone();
        object["metadata"]["uid"] = "v".into();
        event("MODIFIED", object)
    };
    type Change = Box<dyn Fn(&Value) -> Value>;
    let changes: [(Change, &str); 4] = [
        (Box::new(decided("Denied")), "certificate signing request is denied, reason: R, message: m"),
        (Box::new(decided("Failed")), "certificate signing request failed, reason: R, message: m"),
        (Box::new(|made| event("DELETED", made.clone())), "csr \"NAME\" was deleted"),
        (Box::new(other), "csr \"NAME\" changed UIDs"),
    ];
    for (change, expected) in changes {
        let kept = StoredObjects::default();
        let api = keeping(kept.clone(), |_| None);
        let events = api.next_watch();
        let mut request = request();
        request.make(&*api, 0).await.expect("made");
        events.send(change(&kept.lock().expect("not poisoned")[0])).expect("listening");
        let error = request.wait(&*api).await.expect_err(expected);
        assert_eq!(error.to_string(), expected.replace("NAME", request.name()));
        assert!(!error.is_retryable());
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_breaks_is_begun_again() {
    let (kept, authority) = (StoredObjects::default(), Authority::new());
    let list_calls = Arc::new(AtomicUsize::new(0));
    let seen = list_calls.clone();
    let api = keeping(kept.clone(), move |call| {
        let is_ill = call.verb == Verb::List && seen.fetch_add(1, Ordering::Relaxed) == 0;
        is_ill.then(|| Err(refused(500, "InternalError", "ill")))
    });
    let mut request = request();
    request.make(&*api, 0).await.expect("made");
    let made = kept.lock().expect("not poisoned")[0].clone();
    api.next_watch_fails(refused(429, "TooManyRequests", "later"));
    let ends = api.next_watch();
    ends.send(event("ERROR", json!({"kind": "Status", "status": "Failure", "code": 410}))).expect("listening");
    drop(api.next_watch());
    let last = api.next_watch();
    last.send(event("ADDED", authority.answer(&made, 0, DAY))).expect("listening");
    request.wait(&*api).await.expect("a certificate");
    assert_eq!(list_calls.load(Ordering::Relaxed), 5);
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_answer_was_lost_is_found_again() {
    // AC-10-36, and the worse case: the CSR was created and the response was lost.
    let kept = StoredObjects::default();
    let there = kept.clone();
    let tries = AtomicUsize::new(0);
    let api = keeping(kept.clone(), move |call| {
        if call.verb != Verb::Create {
            return None;
        }
        match tries.fetch_add(1, Ordering::Relaxed) {
            0 => Some(Err(refused(503, "ServiceUnavailable", "not now"))),
            1 => {
                there.lock().expect("not poisoned").push(stored(call, "u"));
                Some(Err(ApiError::Lost("reset".to_owned())))
            }
            _ => Some(Err(refused(409, "AlreadyExists", "exists"))),
        }
    });
    let mut request = request();
    let error = request.make(&*api, 0).await.expect_err("refused");
    assert!(error.is_retryable(), "the key is kept for the next attempt");
    request.make(&*api, 0).await.expect("found");
    assert_eq!(kept.lock().expect("not poisoned").len(), 1, "one object");
    let calls = api.calls();
    assert_eq!(calls.last().map(|call| call.name.clone()), Some(request.name().to_owned()));

    let mut other =
        SigningRequest::new(Template::client("m"), PrivateKey::generate().expect("a key"), NamingScheme::Rotation)
            .expect("one");
    let error = other.make(&*api, 0).await.expect_err("another's");
    assert_eq!(error.to_string(), "retrieved csr is not compatible: csr subjects differ");
}

#[tokio::test(start_paused = true)]
async fn an_older_server_is_asked_in_its_own_version() {
    let kept = StoredObjects::default();
    let api = keeping(kept.clone(), |call| {
        (call.resource.version == "v1").then(|| Err(refused(404, "NotFound", "the server could not find it")))
    });
    let mut request = request();
    request.make(&*api, 0).await.expect("made");
    assert_eq!(kept.lock().expect("not poisoned")[0]["apiVersion"], "certificates.k8s.io/v1beta1");
    let api = FakeApi::new(|_| Err(refused(404, "NotFound", "no")));
    let message = super::tests::request().make(&*api, 0).await.expect_err("none").to_string();
    assert_eq!(message, "cannot create certificate signing request: no");
}
