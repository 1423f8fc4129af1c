"""Answers from documents with LangChain: Tandem makes the embeddings and writes the answer.

pip install langchain-openai
python examples/langchain_rag.py "Who guesses the next tokens?"
"""

from __future__ import annotations

import os
import sys

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import OpenAI

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("TANDEM_API_KEY", "none")

DOCUMENTS = [
    "The gateway speaks HTTP. It checks keys and limits, renders the chat template and tokenizes the prompt.",
    "The router chooses an engine for each request: the one that already holds most of the prompt in its cache.",
    "The engine runs the large model. It batches requests and keeps their keys and values in blocks.",
    "The draft service guesses the next tokens. The engine checks all guesses in one pass and keeps the right ones.",
]
PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer in one sentence, only from this text:\n{context}"),
        ("user", "{question}"),
    ]
)


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "Who guesses the next tokens?"
    model = OpenAI(base_url=f"{URL}/v1", api_key=KEY).models.list().data[0].id
    # check_embedding_ctx_length would tokenize with OpenAI's tokenizer, which is not this model's.
    embeddings = OpenAIEmbeddings(model=model, base_url=f"{URL}/v1", api_key=KEY, check_embedding_ctx_length=False)
    store = InMemoryVectorStore.from_documents([Document(text) for text in DOCUMENTS], embeddings)
    found = store.similarity_search(question, k=2)
    context = "\n".join(document.page_content for document in found)
    print(f"found:\n{context}\n")
    llm = ChatOpenAI(model=model, base_url=f"{URL}/v1", api_key=KEY, temperature=0, max_tokens=64)
    chain = PROMPT | llm | StrOutputParser()
    for piece in chain.stream({"context": context, "question": question}):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
