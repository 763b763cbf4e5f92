//! TokenReview and SubjectAccessReview with scripted answers, which take precedence over the rules.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use super::{ApiServer, view::Request};

/// URL path of TokenReview.
pub const TOKENS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
/// URL path of SubjectAccessReview.
pub const ACCESSES: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";

/// Scripted review answers.
#[derive(Default)]
pub struct ScriptedReviews {
    /// Review status by token.
    tokens: HashMap<String, Value>,
    /// Allowed combinations of user, verb, and subresource of nodes.
    allowed: HashSet<(String, String, String)>,
}

impl ScriptedReviews {
    /// Scripted answer to a review, if there is one.
    pub(super) fn scripted_answer(&self, request: &Request) -> Option<Value> {
        let review = request.body.as_ref().filter(|_| request.verb == "create")?;
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match request.plural() {
            "tokenreviews" => {
                let status = self.tokens.get(review["spec"]["token"].as_str()?)?;
                Some(answered(review, status.clone()))
            }
            "subjectaccessreviews" => {
                let (spec, what) = (&review["spec"], &review["spec"]["resourceAttributes"]);
                let access = (word(&spec["user"]), word(&what["verb"]), word(&what["subresource"]));
                let is_allowed = what["resource"] == "nodes" && self.allowed.contains(&access);
                is_allowed.then(|| answered(review, json!({"allowed": true})))
            }
            _ => None,
        }
    }

    /// Negative answer to a review without a scripted or computed one.
    pub(super) fn refused(request: &Request) -> Value {
        let status = match request.plural() {
            "tokenreviews" => json!({"authenticated": false, "user": {}}),
            _ => json!({"allowed": false}),
        };
        answered(request.body.as_ref().unwrap_or(&Value::Null), status)
    }
}

fn answered(review: &Value, status: Value) -> Value {
    let mut answer = review.clone();
    answer["status"] = status;
    answer
}

impl ApiServer {
    /// Accepts a token as that user's.
    pub fn accept_token(&self, token: &str, user: &str, groups: &[&str]) {
        let status = json!({"authenticated": true, "user": {"username": user, "uid": format!("uid-{user}"),
                            "groups": groups, "extra": {"seen": ["yes"]}}});
        self.shared.core().reviews.tokens.insert(token.to_owned(), status);
    }

    /// Rejects a token with that error.
    pub fn refuse_token(&self, token: &str, why: &str) {
        let status = json!({"authenticated": false, "user": {}, "error": why});
        self.shared.core().reviews.tokens.insert(token.to_owned(), status);
    }

    /// Allows the user that verb on that subresource of nodes.
    pub fn allow(&self, user: &str, verb: &str, subresource: &str) {
        let access = (user.to_owned(), verb.to_owned(), subresource.to_owned());
        self.shared.core().reviews.allowed.insert(access);
    }

    /// Revokes what [`ApiServer::allow`] has granted.
    pub fn forbid(&self, user: &str, verb: &str, subresource: &str) {
        let access = (user.to_owned(), verb.to_owned(), subresource.to_owned());
        self.shared.core().reviews.allowed.remove(&access);
    }
}
